//! The places where data passes from one station to the next.
//!
//! In a build for use they cost nothing. In unit tests they can be made slow, made to fail, and made
//! to overwrite buffers that are about to be filled: a consumer that comes too early, or a producer
//! that skips an element, then shows.

/// A place where data passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Boundary {
    /// A tap hands over a gradient.
    HandedOver { slot: usize },
    /// The reader begins with a parcel whose first gradient is of `slot`.
    Read { slot: usize },
    /// The parcel's bytes are on the host.
    Landed { slot: usize },
    /// A gradient goes into the store.
    Stored { slot: usize },
    /// The CPU step begins with a tile.
    Stepped { slot: usize, tile: usize },
    /// The uploader begins with a tile.
    Sent { slot: usize, tile: usize },
    /// Weights are handed back to the model.
    HandedBack { slot: usize },
}

/// What a test does at boundaries. An error is reported as the station's own.
#[cfg(test)]
pub(crate) type Hook = dyn Fn(Boundary) -> Result<(), String> + Send + Sync;

/// The boundaries of one engine.
#[derive(Clone, Default)]
pub(crate) struct Boundaries {
    #[cfg(test)]
    hook: Option<std::sync::Arc<Hook>>,
    #[cfg(test)]
    damage: Option<std::sync::Arc<Damage>>,
}

/// What a test does to values that pass a boundary.
#[cfg(test)]
pub(crate) type Damage = dyn Fn(Boundary, &mut [f32]) + Send + Sync;

#[cfg(test)]
thread_local! {
    static NEXT: std::cell::RefCell<Boundaries> = const { std::cell::RefCell::new(Boundaries { hook: None, damage: None }) };
}

#[cfg(not(test))]
impl Boundaries {
    /// The boundaries of the engine that is being built.
    pub(crate) fn current() -> Self {
        Self::default()
    }

    /// Notes that data passes `boundary`.
    #[inline(always)]
    pub(crate) fn pass(&self, _boundary: Boundary) -> Result<(), String> {
        Ok(())
    }

    /// Overwrites a buffer that is about to be filled.
    #[inline(always)]
    pub(crate) fn poison(&self, _buffer: &mut [u8]) {}

    /// Damages what passes `boundary`.
    #[inline(always)]
    pub(crate) fn damage(&self, _boundary: Boundary, _values: &mut [f32]) {}

    /// Whether it does.
    #[inline(always)]
    pub(crate) fn damages(&self) -> bool {
        false
    }

    /// Whether buffers are overwritten before they are filled.
    #[cfg_attr(not(feature = "cubecl-backend"), allow(dead_code))]
    #[inline(always)]
    pub(crate) fn poisons(&self) -> bool {
        false
    }
}

#[cfg(test)]
impl Boundaries {
    pub(crate) fn current() -> Self {
        NEXT.with_borrow(Clone::clone)
    }

    /// Calls `build` so that engines it builds on this thread have `hook` at their boundaries.
    pub(crate) fn with<R>(hook: std::sync::Arc<Hook>, build: impl FnOnce() -> R) -> R {
        Self::set(
            Self {
                hook: Some(hook),
                damage: None,
            },
            build,
        )
    }

    /// The same with values that pass, instead of places.
    pub(crate) fn damaging<R>(damage: std::sync::Arc<Damage>, build: impl FnOnce() -> R) -> R {
        Self::set(
            Self {
                hook: None,
                damage: Some(damage),
            },
            build,
        )
    }

    fn set<R>(next: Self, build: impl FnOnce() -> R) -> R {
        NEXT.set(next);
        let built = build();
        NEXT.set(Self::default());
        built
    }

    pub(crate) fn damage(&self, boundary: Boundary, values: &mut [f32]) {
        if let Some(damage) = &self.damage {
            damage(boundary, values);
        }
    }

    pub(crate) fn damages(&self) -> bool {
        self.damage.is_some()
    }

    pub(crate) fn pass(&self, boundary: Boundary) -> Result<(), String> {
        self.hook.as_ref().map_or(Ok(()), |hook| hook(boundary))
    }

    /// Fills with NaN in every element type there is.
    pub(crate) fn poison(&self, buffer: &mut [u8]) {
        if self.poisons() {
            buffer.fill(0xFF);
        }
    }

    pub(crate) fn poisons(&self) -> bool {
        self.hook.is_some()
    }
}
