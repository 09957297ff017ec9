//! Memory of exact size, aligned to cache lines, in huge pages where it is large.

use std::marker::PhantomData;

use bytemuck::{Pod, Zeroable};

/// One cache line; gives buffers their alignment without unsafe code.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; Line::BYTES]);

impl Line {
    const BYTES: usize = 64;
}

/// Bytes from which on a buffer gets pages of its own. Below two huge pages there might be none in it.
#[cfg(unix)]
const PAGES_FROM: usize = 4 << 20;

/// `len` values that start on a 64-byte boundary, zero at first.
///
/// Zeroed pages come from the operating system and cost nothing until they are written. Large buffers ask
/// for huge pages: the step walks several streams at once, and with pages of 4 KiB each step of a stream
/// into the next page waits for a translation.
#[derive(Debug)]
pub(crate) struct Buffer<T> {
    memory: Memory,
    len: usize,
    values: PhantomData<T>,
}

/// A buffer of `f32`.
pub(crate) type AlignedBuffer = Buffer<f32>;

#[derive(Debug)]
enum Memory {
    Heap(Box<[Line]>),
    #[cfg(unix)]
    Pages(memmap2::MmapMut),
}

impl Memory {
    fn zeroed(bytes: usize) -> Self {
        let lines = bytes.div_ceil(Line::BYTES);
        #[cfg(unix)]
        if bytes >= PAGES_FROM
            && let Some(pages) = pages(lines * Line::BYTES)
        {
            return Self::Pages(pages);
        }
        Self::Heap(bytemuck::allocation::zeroed_slice_box(lines))
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice(lines),
            #[cfg(unix)]
            Self::Pages(pages) => pages,
        }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Heap(lines) => bytemuck::cast_slice_mut(lines),
            #[cfg(unix)]
            Self::Pages(pages) => pages,
        }
    }
}

/// Pages of zeros, or nothing where the system has none; the heap then says so in its way.
#[cfg(unix)]
fn pages(bytes: usize) -> Option<memmap2::MmapMut> {
    let pages = memmap2::MmapOptions::new().len(bytes).map_anon().ok()?;
    // A kernel without huge pages refuses: only speed depends on it.
    #[cfg(target_os = "linux")]
    let _ = pages.advise(memmap2::Advice::HugePage);
    Some(pages)
}

impl<T: Pod> Buffer<T> {
    /// A zeroed buffer of `len` values.
    pub(crate) fn zeroed(len: usize) -> Self {
        Self {
            memory: Memory::zeroed(len * size_of::<T>()),
            len,
            values: PhantomData,
        }
    }

    /// Bytes taken, padding to the last cache line included.
    pub(crate) fn bytes(&self) -> usize {
        self.memory.bytes().len()
    }
}

impl<T: Pod> std::ops::Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let used = self.len * size_of::<T>();
        bytemuck::cast_slice(&self.memory.bytes()[..used])
    }
}

impl<T: Pod> std::ops::DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let used = self.len * size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.memory.bytes_mut()[..used])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_start_on_a_cache_line_and_have_the_length_asked_for() {
        for len in [0, 1, 15, 16, 17, 1000, (4 << 20) + 3] {
            let mut buffer = Buffer::<f32>::zeroed(len);
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % 64, 0);
            assert!(buffer.iter().all(|&x| x == 0.0));
            assert_eq!(buffer.bytes(), len.div_ceil(16) * 64);
            if let Some(last) = buffer.last_mut() {
                *last = 1.0;
                assert_eq!(buffer[len - 1], 1.0);
            }
        }
        assert_eq!(Buffer::<u8>::zeroed(65).bytes(), 128);
        assert_eq!(Buffer::<u16>::zeroed(33).len(), 33);
    }
}
