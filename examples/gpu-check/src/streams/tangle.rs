//! The model: pairs of vectors that multiply each other, and matrices.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use crate::numbers::Numbers;

/// Rows of the input that matrices are multiplied with.
pub const BATCH: usize = 4;

/// Lengths and uses. The same for everybody who computes with it.
pub struct Plan {
    /// Number of the model: another has other data.
    pub index: u64,
    /// Length of both vectors of a pair, and how often the left one is used.
    pub pairs: Vec<(usize, usize)>,
    /// Rows and columns of the matrices.
    pub grids: Vec<(usize, usize)>,
}

impl Plan {
    /// The plan of model `index`.
    pub fn new(index: u64, small: bool, gpu: bool) -> Self {
        // 32 Ki half elements are the border between packed and lone gradients.
        let mut pairs = vec![(1, 1), (3, 2), (17, 3), (1000, 5), (4096, 2), (33_000, 3)];
        let mut grids = vec![(16, 48)];
        if !small {
            pairs.extend([(100_000, 4), (1_000_003, 3), (32_768, 1)]);
            grids.extend([(128, 96), (640, 1024)]);
        }
        if gpu && !small {
            // Several MiB in any type: tens of tiles.
            pairs.push((2_500_000, 2));
        }
        Self {
            index,
            pairs,
            grids,
        }
    }

    /// Elements of the largest parameter.
    pub fn largest(&self) -> usize {
        let grids = self.grids.iter().map(|(rows, columns)| rows * columns);
        let pairs = self.pairs.iter().map(|(len, _)| *len);
        pairs.chain(grids).max().unwrap_or(0)
    }

    /// The weights to begin with: left and right of each pair, then the matrices.
    pub fn first(&self) -> Vec<Vec<i32>> {
        let mut numbers = Numbers::new(self.index << 32);
        let pairs = self.pairs.iter().flat_map(|(len, _)| [*len, *len]);
        let grids = self.grids.iter().map(|(rows, columns)| rows * columns);
        pairs.chain(grids).map(|len| numbers.thirds(len)).collect()
    }

    /// What the data of a round is drawn from, in a fixed order.
    pub fn data(&self, round: u64) -> Numbers {
        Numbers::new((self.index << 32) + 1 + round)
    }
}

/// The parameters.
#[derive(Module, Debug)]
pub struct Tangle {
    pairs: Vec<Pair>,
    grids: Vec<Param<Tensor<2>>>,
}

#[derive(Module, Debug)]
struct Pair {
    left: Param<Tensor<1>>,
    right: Param<Tensor<1>>,
}

fn floats(values: &[i32]) -> Vec<f32> {
    values.iter().map(|&value| value as f32).collect()
}

/// Operations that change nothing, of the kind that run in place where nobody else holds the buffer.
fn chain<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.neg().mul_scalar(2.0).neg().mul_scalar(0.5)
}

impl Tangle {
    /// The model of `plan`.
    pub fn new(plan: &Plan, device: &Device) -> Self {
        let mut first = plan.first().into_iter();
        let mut next = || floats(&first.next().expect("a value for every parameter"));
        let mut vector = |len: usize| Param::from_data(TensorData::new(next(), [len]), device);
        let pairs = plan.pairs.iter();
        let pairs = pairs.map(|&(len, _)| Pair {
            left: vector(len),
            right: vector(len),
        });
        let pairs = pairs.collect();
        let grids = plan.grids.iter();
        let grids = grids.map(|&(rows, columns)| {
            Param::from_data(TensorData::new(next(), [rows, columns]), device)
        });
        Self {
            pairs,
            grids: grids.collect(),
        }
    }

    /// A loss whose gradients are integers; its own value is of no interest.
    ///
    /// With `s` of signs and `d`, `x`, `y` of -1, 0 and 1, all drawn anew each round:
    /// `sum(left right s + left d_1 + left d_2 + ..)` and `sum((x grid) y + grid stop(grid) s)`.
    pub fn loss(
        &self,
        plan: &Plan,
        round: u64,
        device: &Device,
        dtype: FloatDType,
        mut pause: impl FnMut(),
    ) -> Tensor<1> {
        let mut numbers = plan.data(round);
        let dtype = DType::from(dtype);
        let vector = |values: Vec<i32>| {
            let data = TensorData::new(floats(&values), [values.len()]);
            Tensor::<1>::from_data(data, (device, dtype))
        };
        let matrix = |values: Vec<i32>, shape: [usize; 2]| {
            let data = TensorData::new(floats(&values), shape);
            Tensor::<2>::from_data(data, (device, dtype))
        };
        let mut loss = Tensor::<1>::zeros([1], (device, dtype));
        for (pair, &(len, uses)) in self.pairs.iter().zip(&plan.pairs) {
            let signs = vector(numbers.signs(len));
            let product = chain(pair.left.val()) * chain(pair.right.val());
            loss = loss + (product * signs).sum();
            for _ in 1..uses {
                pause();
                let data = vector(numbers.thirds(len));
                loss = loss + chain(chain(pair.left.val()) * data).sum();
            }
        }
        for (grid, &(rows, columns)) in self.grids.iter().zip(&plan.grids) {
            pause();
            let signs = matrix(numbers.signs(rows * columns), [rows, columns]);
            let x = matrix(numbers.thirds(BATCH * rows), [BATCH, rows]);
            let y = matrix(numbers.thirds(BATCH * columns), [BATCH, columns]);
            let weight = grid.val();
            let still = weight.clone().detach();
            loss = loss + (chain(weight.clone()) * (still * signs)).sum();
            loss = loss + (x.matmul(weight) * y).sum();
        }
        loss
    }

    /// All weights, in the order of [`Plan::first`].
    pub fn weights(&self) -> Vec<f32> {
        let read = |values: Result<Vec<f32>, _>| values.expect("weights can be read");
        let pairs = self.pairs.iter().flat_map(|pair| [&pair.left, &pair.right]);
        let pairs = pairs.flat_map(|p| read(p.base().inner().try_into_vec_as::<f32>()));
        let grids = self.grids.iter();
        let grids = grids.flat_map(|p| read(p.base().inner().try_into_vec_as::<f32>()));
        pairs.chain(grids).collect()
    }
}
