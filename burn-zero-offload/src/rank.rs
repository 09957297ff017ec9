//! From a rank that is known at run time to one that the compiler knows.

/// Calls a body with `$d` as the constant rank.
macro_rules! with_rank {
    ($rank:expr, $d:ident => $body:expr) => {
        $crate::rank::with_rank!($rank, $d => $body, [1 2 3 4 5 6 7 8])
    };
    ($rank:expr, $d:ident => $body:expr, [$($n:literal)*]) => {
        match $rank {
            $($n => { const $d: usize = $n; $body })*
            other => panic!("Burn has no tensors of rank {other}"),
        }
    };
}

pub(crate) use with_rank;
