//! Makes taps fire right after the operation that used the weight.
//!
//! Autodiff runs backward steps by depth, deepest first, and the depth of a node is one more than
//! that of its deepest operand. A tap on a leaf would have depth 1: all taps would fire after the
//! whole backward, with every gradient alive. An operand that needs no gradient still lends its
//! depth without becoming a parent. So each tap gets such an operand, a *rung*, as deep as the
//! number of nodes recorded since its forward pass began. No node recorded before can be deeper
//! than that, so in backward the tap comes before all of them.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, AutodiffBackend, Backend, Flex};
use burn::tensor::{FloatDType, Shape};
use parking_lot::Mutex;

/// The deepest rung. Forward passes that record more nodes start counting anew: their taps still
/// deliver every gradient, only later than they could.
///
/// Also bounds the number of rungs kept, one graph node and an empty tensor each.
const MAX_DEPTH: u64 = 1 << 16;

/// Nodes that count between two taps. A forward pass uses its next weight long before it has recorded so
/// many; what is more was recorded by other threads, while this one waited for its turn.
const MAX_STEP: u64 = 1 << 10;

/// Rungs live on Flex whatever backend the model runs on: only their place in the graph matters,
/// and an empty Flex tensor takes no device memory.
type Rung = FloatTensor<Autodiff<Flex>>;

/// The rungs asked for so far, by depth. A missing one is built from the nearest below.
static RUNGS: Mutex<BTreeMap<u64, Rung>> = Mutex::new(BTreeMap::new());

/// An operand of graph depth `depth` that needs no gradient.
fn rung(depth: u64) -> NodeGuard {
    let mut rungs = RUNGS.lock();
    if let Some(rung) = rungs.get(&depth) {
        return rung.node();
    }
    let (mut at, mut rung) = match rungs.range(..depth).next_back() {
        Some((at, rung)) => (*at, rung.clone()),
        None => {
            let empty =
                Flex::float_empty(Shape::from([0usize]), &Default::default(), FloatDType::F32);
            (0, <Autodiff<Flex> as AutodiffBackend>::from_inner(empty))
        }
    };
    while at < depth {
        rung = climb(rung);
        at += 1;
    }
    let guard = rung.node();
    rungs.insert(depth, rung);
    guard
}

fn climb(rung: Rung) -> Rung {
    #[derive(Debug)]
    struct Climb;

    impl<B: Backend> Backward<B, 1> for Climb {
        type State = ();

        fn backward(self, _: Ops<(), 1>, _: &mut Gradients, _: &mut Checkpointer) {
            unreachable!("a rung needs no gradient, so nothing runs backward through it")
        }
    }

    let (primitive, guard) = rung.into_parts();
    match Backward::<Flex, 1>::prepare::<NoCheckpointing>(Climb, [guard])
        .compute_bound()
        .stateful()
    {
        OpsKind::Tracked(prep) => prep.finish((), primitive),
        OpsKind::UnTracked(prep) => prep.finish(primitive),
    }
}

/// Where a thread's current forward pass through a sink's taps stands.
struct Forward {
    /// Depth of its last tap: at least the number of nodes it had recorded then.
    depth: u64,
    /// Value of the node counter after that tap.
    counted: u64,
    /// A tap of this forward has fired: the next one begins a new forward.
    fired: bool,
    /// Shared with the taps of this forward. When none is left, the graph is gone.
    taps: Arc<()>,
}

thread_local! {
    /// Per thread, so that another thread's backward does not end this thread's forward, and per
    /// sink, so that two models trained in turn do not end each other's.
    static FORWARDS: RefCell<HashMap<u64, Forward>> = RefCell::new(HashMap::new());
}

/// A tap's place on the ladder.
pub(super) struct Step {
    /// The operand that lends its depth.
    pub(super) rung: NodeGuard,
    /// To be kept by the tap for as long as it may fire.
    pub(super) alive: Arc<()>,
}

/// Where the next tap of `sink` on this thread stands.
pub(super) fn next_step(sink: u64) -> Step {
    // Ids count the nodes of all threads. Nodes of others make a tap deeper than needed, never
    // shallower, so the order within this thread's graph stays right.
    let now = burn_autodiff::NodeId::new().value;
    FORWARDS.with_borrow_mut(|forwards| {
        forwards.retain(|id, forward| *id == sink || Arc::strong_count(&forward.taps) > 1);
        let begin = || Forward {
            depth: 0,
            counted: now,
            fired: false,
            taps: Arc::new(()),
        };
        let forward = forwards.entry(sink).or_insert_with(begin);
        let abandoned = Arc::strong_count(&forward.taps) == 1;
        let depth = forward.depth + (now - forward.counted).min(MAX_STEP);
        if forward.fired || abandoned || depth > MAX_DEPTH {
            *forward = begin();
        } else {
            forward.depth = depth;
        }
        let rung = rung(forward.depth);
        // A rung that had to be built is made of nodes, too. They are not part of the pass.
        forward.counted = burn_autodiff::NodeId::new().value;
        Step {
            rung,
            alive: forward.taps.clone(),
        }
    })
}

/// Notes that a tap of `sink` fired on this thread.
pub(super) fn fired(sink: u64) {
    FORWARDS.with_borrow_mut(|forwards| {
        if let Some(forward) = forwards.get_mut(&sink) {
            forward.fired = true;
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(sink: u64) -> Option<u64> {
        FORWARDS.with_borrow(|forwards| forwards.get(&sink).map(|forward| forward.depth))
    }

    fn record(nodes: u64) {
        for _ in 0..nodes {
            burn_autodiff::NodeId::new();
        }
    }

    #[test]
    fn a_forward_begins_after_a_fired_tap_and_not_before() {
        let first = next_step(1001);
        assert_eq!(depth(1001), Some(0));
        let second = next_step(1001);
        assert!(depth(1001) > Some(0));
        fired(1001);
        let third = next_step(1001);
        assert_eq!(depth(1001), Some(0));
        drop((first, second, third));
    }

    #[test]
    fn an_abandoned_forward_ends_with_its_last_tap() {
        let taps = [next_step(1002), next_step(1002)];
        assert!(depth(1002) > Some(0));
        drop(taps);
        let _next = next_step(1002);
        assert_eq!(depth(1002), Some(0));
    }

    #[test]
    fn sinks_and_threads_do_not_end_each_others_forward() {
        let _taps = [next_step(1003), next_step(1003)];
        fired(1004);
        let _other = next_step(1004);
        std::thread::spawn(|| fired(1003)).join().unwrap();
        let _next = next_step(1003);
        assert!(depth(1003) > Some(1));
    }

    /// However many nodes another thread records meanwhile, this forward goes on, and there is room for
    /// the rest of it.
    #[test]
    fn another_threads_nodes_do_not_use_up_the_ladder() {
        let _first = next_step(1005);
        std::thread::spawn(|| record(2 * MAX_DEPTH)).join().unwrap();
        let _second = next_step(1005);
        assert_eq!(depth(1005), Some(MAX_STEP));
        let _third = next_step(1005);
        assert!(depth(1005) > Some(MAX_STEP));
    }

    /// The first forward of a process builds the rungs it stands on.
    #[test]
    fn building_rungs_does_not_deepen_the_next_tap() {
        let mut taps = vec![next_step(1006)];
        let mut steps = vec![];
        for _ in 0..50 {
            record(100);
            taps.push(next_step(1006));
            let before = depth(1006).unwrap();
            taps.push(next_step(1006));
            steps.push(depth(1006).unwrap().saturating_sub(before));
        }
        // Other tests record nodes at times; a rung that was counted would be there every time.
        assert!(steps.iter().any(|step| (1..50).contains(step)), "{steps:?}");
    }

    #[test]
    fn rungs_are_kept() {
        drop(rung(40));
        drop(rung(44));
        let rungs = RUNGS.lock();
        assert!(rungs.contains_key(&40) && rungs.contains_key(&44));
    }
}
