//! Slices seen as rows of 16 elements, and what is left over.

/// Elements per row: a vector of `f32` on the widest machines.
pub(in crate::optimize) const LANES: usize = 16;

/// A mutable slice, cut into rows.
pub(in crate::optimize) struct Rows<'a, T> {
    full: &'a mut [[T; LANES]],
    rest: &'a mut [T],
}

impl<'a, T: Copy + Default> Rows<'a, T> {
    pub(in crate::optimize) fn new(values: &'a mut [T]) -> Self {
        let (full, rest) = values.as_chunks_mut();
        Self { full, rest }
    }

    #[inline(always)]
    pub(in crate::optimize) fn read(&self, row: usize) -> [T; LANES] {
        self.full[row]
    }

    /// Number of whole rows.
    #[inline(always)]
    pub(in crate::optimize) fn full_rows(&self) -> usize {
        self.full.len()
    }

    /// Number of elements after them.
    #[inline(always)]
    pub(in crate::optimize) fn rest_len(&self) -> usize {
        self.rest.len()
    }

    #[inline(always)]
    pub(in crate::optimize) fn read_rest(&self) -> [T; LANES] {
        padded(self.rest)
    }

    #[inline(always)]
    pub(in crate::optimize) fn write(&mut self, row: usize, values: [T; LANES]) {
        self.full[row] = values;
    }

    #[inline(always)]
    pub(in crate::optimize) fn write_rest(&mut self, values: [T; LANES]) {
        self.rest.copy_from_slice(&values[..self.rest.len()]);
    }
}

/// A row of what there is, then zeros.
#[inline(always)]
pub(super) fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut row = [T::default(); LANES];
    row[..rest.len()].copy_from_slice(rest);
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_padded_and_written_as_far_as_it_goes() {
        let mut values: Vec<u16> = (1..=37).collect();
        let mut rows = Rows::new(&mut values);
        assert_eq!(rows.read(1)[0], 17);
        assert_eq!(rows.read_rest()[..6], [33, 34, 35, 36, 37, 0]);
        rows.write_rest([9; LANES]);
        rows.write(0, [7; LANES]);
        assert_eq!((rows.full_rows(), rows.rest_len()), (2, 5));
        assert_eq!(values[..16], [7; 16]);
        assert_eq!(values[32..], [9; 5]);
        assert_eq!(values[31], 32);
    }
}
