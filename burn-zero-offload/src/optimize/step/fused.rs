//! One pass over memory: gradient, scaling, rule, master weights, state and image in one loop. There is
//! a loop for every combination; those for rounded state only the rules have that most people use.

use half::{bf16, f16};

use super::Piece;
use super::kernel::usage;
use super::lanes::Loop;
use crate::optimize::codec::{
    Codes, Column, MasterMut, Mirrored, MomentMut, Noise, Rows, Scratch, Source, Split8, Split16,
    Values,
};
use crate::optimize::{GradientView, ImageMut, Rule, SimdLevel, Update};

/// Carries an update out, or gives the piece back if there is no loop for it: gradients clipped by value
/// or of another type than the weights, rounded state of most rules or beside masters in `f32`, no vector
/// instructions.
pub(super) fn run<'a, R: Rule<N>, const N: usize>(
    simd: SimdLevel,
    scalars: &R::Scalars,
    update: &Update,
    piece: Piece<'a>,
) -> Option<Piece<'a>> {
    let scaling = update.scaling;
    if simd == SimdLevel::Scalar || scaling.bound != f32::INFINITY {
        return Some(piece);
    }
    let kinds = (&piece.master, &piece.image, &piece.gradient);
    let single = piece.state.iter().all(|s| matches!(s, MomentMut::F32(_)));
    let exists = match kinds {
        (MasterMut::F32(_), ImageMut::F32(_), GradientView::F32(_)) => single,
        (MasterMut::F32(_), ImageMut::F16(_), GradientView::F16(_) | GradientView::F32(_)) => {
            single
        }
        (MasterMut::F32(_), ImageMut::Bf16(_), GradientView::Bf16(_) | GradientView::F32(_)) => {
            single
        }
        (
            MasterMut::Lower16(_),
            ImageMut::Bf16(_),
            GradientView::Bf16(_) | GradientView::F32(_),
        ) => single || R::FUSED,
        (MasterMut::Lower8(_), ImageMut::Bf16(_), GradientView::Bf16(_) | GradientView::F32(_)) => {
            R::FUSED
        }
        _ => false,
    };
    if !exists {
        return Some(piece);
    }
    let call = Call::<R, N> {
        simd,
        scalars,
        factor: scaling.factor,
        len: piece.len(),
        noise: update.noise.from(piece.start),
    };
    call.run(piece);
    None
}

/// Finds the loop for the types of a piece.
struct Call<'a, R: Rule<N>, const N: usize> {
    simd: SimdLevel,
    scalars: &'a R::Scalars,
    factor: f32,
    len: usize,
    noise: Noise,
}

type States<'a> = smallvec::SmallVec<[MomentMut<'a>; 3]>;

impl<R: Rule<N>, const N: usize> Call<'_, R, N> {
    fn run(&self, piece: Piece<'_>) {
        let (gradient, state) = (piece.gradient, piece.state);
        match (piece.master, piece.image, gradient) {
            (MasterMut::F32(master), ImageMut::F32(image), GradientView::F32(g)) => {
                let (master, image) = (Rows::new(master), Rows::new(image));
                self.exact(Mirrored { master, image }, g, state);
            }
            (MasterMut::F32(master), ImageMut::F16(image), gradient) => {
                let (master, image) = (Rows::new(master), Rows::<f16>::new(image));
                let master = Mirrored { master, image };
                match gradient {
                    GradientView::F16(g) => self.exact(master, g, state),
                    GradientView::F32(g) => self.exact(master, g, state),
                    GradientView::Bf16(_) => unreachable!("there is no such loop"),
                }
            }
            (MasterMut::F32(master), ImageMut::Bf16(image), gradient) => {
                let (master, image) = (Rows::new(master), Rows::<bf16>::new(image));
                let master = Mirrored { master, image };
                match gradient {
                    GradientView::Bf16(g) => self.exact(master, g, state),
                    GradientView::F32(g) => self.exact(master, g, state),
                    GradientView::F16(_) => unreachable!("there is no such loop"),
                }
            }
            (MasterMut::Lower16(lower), ImageMut::Bf16(upper), gradient) => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                let master = Split16 { upper, lower };
                match gradient {
                    GradientView::Bf16(g) => self.any(master, g, state),
                    GradientView::F32(g) => self.any(master, g, state),
                    GradientView::F16(_) => unreachable!("there is no such loop"),
                }
            }
            (MasterMut::Lower8(lower), ImageMut::Bf16(upper), gradient) if R::FUSED => {
                let (upper, lower) = (Rows::new(upper), Rows::new(lower));
                let master = Split8 { upper, lower };
                match gradient {
                    GradientView::Bf16(g) => self.int8(master, g, state),
                    GradientView::F32(g) => self.int8(master, g, state),
                    GradientView::F16(_) => unreachable!("there is no such loop"),
                }
            }
            _ => unreachable!("there is no such loop"),
        }
    }

    fn any<M: Column, G: Source>(&self, master: M, gradient: G, state: States<'_>) {
        // Known when the program is compiled: other rules have no loops for rounded state.
        if !R::FUSED {
            return self.exact(master, gradient, state);
        }
        match state.first() {
            Some(MomentMut::Bf16(_)) => {
                let columns = columns::<_, N>(state, |values| match values {
                    MomentMut::Bf16(values) => Values(Rows::new(values)),
                    _ => mixed(),
                });
                self.rows(master, columns, gradient);
            }
            Some(MomentMut::Int8 { .. }) => self.int8(master, gradient, state),
            _ => self.exact(master, gradient, state),
        }
    }

    fn exact<M: Column, G: Source>(&self, master: M, gradient: G, state: States<'_>) {
        let columns = columns::<_, N>(state, |values| match values {
            MomentMut::F32(values) => Values(Rows::new(values)),
            _ => mixed(),
        });
        self.rows(master, columns, gradient);
    }

    fn int8<M: Column, G: Source>(&self, master: M, gradient: G, state: States<'_>) {
        let mut scratch = [const { Scratch::new() }; N];
        let mut free = scratch.iter_mut().enumerate();
        let columns = columns::<_, N>(state, |values| match (values, free.next()) {
            (MomentMut::Int8 { codes, scales }, Some((index, scratch))) => {
                Codes::new(codes, scales, scratch, usage::<R, N>(index).kind)
            }
            _ => mixed(),
        });
        self.rows(master, columns, gradient);
    }

    fn rows<M: Column, C: Column, G: Source>(&self, master: M, state: [C; N], gradient: G) {
        self.simd.run(Loop::<R, N, M, C, G> {
            scalars: self.scalars,
            factor: self.factor,
            len: self.len,
            noise: self.noise,
            master,
            state,
            gradient,
        });
    }
}

fn columns<'a, C, const N: usize>(
    state: States<'a>,
    mut column: impl FnMut(MomentMut<'a>) -> C,
) -> [C; N] {
    let mut state = state.into_iter();
    std::array::from_fn(|_| match state.next() {
        Some(values) => column(values),
        None => mixed(),
    })
}

fn mixed() -> ! {
    panic!("the values that a rule keeps for a weight have to be kept alike")
}
