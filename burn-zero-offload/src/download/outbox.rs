//! Gradients on a CubeCL device that wait there: small ones for company, sums for their last term.
//!
//! Everything here is enqueued on the stream of the thread that runs backward, right behind the
//! kernel that computed the gradient, so it is ordered without any event.

use burn::tensor::{DType, Shape, StreamId};
use burn_cubecl::CubeDevice;
use burn_cubecl::kernel::into_contiguous_aligned;
use burn_cubecl::ops::numeric::{empty_device_contiguous_dtype, full_device_dtype, zeros_client};
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::server::Handle;

use super::budget::Room;
use super::parcel::Member;
use super::parcel::cube::CubeParcel;
use crate::kernels;
use crate::optimize::Precision;

/// Gradients of at most this many bytes are packed.
pub(super) const SMALL: usize = 64 << 10;
/// Bytes of a pack. Copies of this size run at nearly the rate of the link.
pub(super) const PACK: usize = 512 << 10;
/// Most gradients in a pack; bounds the counters.
const MEMBERS: usize = 1024;

/// What waits on the devices.
#[derive(Default)]
pub(super) struct Outbox {
    packs: Vec<Pack>,
    sums: Vec<Sum>,
}

/// Who may add to a pack or a sum: kernels of one stream on one device.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    stream: StreamId,
    device: CubeDevice,
}

impl Place {
    fn of(gradient: &CubeTensor) -> Self {
        Self {
            stream: StreamId::current(),
            device: gradient.device.clone(),
        }
    }

    /// See the order argued at [`CubeParcel`]. Also right from another thread than the one whose
    /// stream this is: that thread has handed its kernels to the device before it let go of the lock
    /// around the outbox.
    fn marker(&self, client: &Client) -> Handle {
        self.stream.executes(|| client.empty(4))
    }
}

struct Pack {
    place: Place,
    precision: Precision,
    wire: CubeTensor,
    counts: CubeTensor,
    members: Vec<Member>,
    /// Elements that are taken.
    filled: usize,
    room: Room,
}

struct Sum {
    place: Place,
    member: Member,
    /// In `f32`.
    value: CubeTensor,
    room: Room,
}

/// A parcel with the device it is on and the room it takes.
pub(super) type Ready = (CubeDevice, CubeParcel, Room);

fn dtype(precision: Precision) -> DType {
    crate::upload::to_dtype(precision).into()
}

fn empty(like: &CubeTensor, len: usize, precision: Precision) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    empty_device_contiguous_dtype(client, device, Shape::from([len]), dtype(precision))
}

fn counters(like: &CubeTensor, len: usize) -> CubeTensor {
    let (client, device) = (like.client.clone(), like.device.clone());
    zeros_client(client, device, Shape::from([len]), DType::U32)
}

impl Outbox {
    /// Whether a sum is waiting for `gradient`.
    pub(super) fn sums(&self, member: &Member, gradient: &CubeTensor) -> bool {
        self.sum(member, gradient).is_some()
    }

    fn sum(&self, member: &Member, gradient: &CubeTensor) -> Option<usize> {
        let place = Place::of(gradient);
        let mut sums = self.sums.iter();
        sums.position(|sum| {
            let (slot, scale) = (sum.member.slot, sum.member.scale);
            slot == member.slot && scale == member.scale && sum.place == place
        })
    }

    /// Begins a sum with its first term.
    pub(super) fn begin_sum(&mut self, member: Member, gradient: CubeTensor, room: Room) {
        let value = empty(&gradient, member.len, Precision::F32);
        kernels::pack(&gradient, &value, 0, &counters(&gradient, 1), 0);
        let precision = Precision::F32;
        self.sums.push(Sum {
            place: Place::of(&gradient),
            member: Member {
                precision,
                ..member
            },
            value,
            room,
        });
    }

    /// Adds a term; after the last one the sum is ready.
    pub(super) fn add(
        &mut self,
        member: &Member,
        gradient: CubeTensor,
        last: bool,
    ) -> Option<Ready> {
        let index = self.sum(member, &gradient)?;
        kernels::accumulate(&self.sums[index].value, &gradient);
        last.then(|| self.sums.remove(index).ready())
    }

    /// Ends the sum of `slot` that this thread's stream began, if there is one.
    pub(super) fn end_sum(&mut self, slot: usize) -> Option<Ready> {
        let stream = StreamId::current();
        let mut sums = self.sums.iter();
        let index = sums.position(|sum| sum.member.slot == slot && sum.place.stream == stream)?;
        Some(self.sums.remove(index).ready())
    }

    /// Whether `gradient` fits into a pack that is open.
    pub(super) fn fits(&self, member: &Member, gradient: &CubeTensor) -> bool {
        let precision = member.precision;
        self.pack(gradient, precision).is_some_and(|index| {
            let pack = &self.packs[index];
            let end = pack.filled + member.len;
            end * precision.size() <= pack.wire.handle.size_in_used() as usize
                && pack.members.len() < MEMBERS
        })
    }

    fn pack(&self, gradient: &CubeTensor, precision: Precision) -> Option<usize> {
        let place = Place::of(gradient);
        let mut packs = self.packs.iter();
        packs.position(|pack| pack.precision == precision && pack.place == place)
    }

    /// Opens a pack of `bytes` for gradients like `gradient`. One that is open already is closed.
    pub(super) fn open_pack(
        &mut self,
        gradient: &CubeTensor,
        precision: Precision,
        bytes: usize,
        room: Room,
        poison: bool,
    ) -> Option<Ready> {
        let full = self.pack(gradient, precision);
        let full = full.map(|index| self.packs.remove(index).ready());
        let mut wire = empty(gradient, bytes / precision.size(), precision);
        if poison {
            let value = cubecl::prelude::InputScalar::new(f32::NAN, kernels::elem_type(wire.dtype));
            let (client, device) = (wire.client.clone(), wire.device.clone());
            wire = full_device_dtype(client, wire.meta.shape().clone(), device, value, wire.dtype);
        }
        self.packs.push(Pack {
            place: Place::of(gradient),
            precision,
            wire,
            counts: counters(gradient, MEMBERS),
            members: Vec::new(),
            filled: 0,
            room,
        });
        full
    }

    /// Packs a gradient into the open pack it [`fits`](Self::fits) in.
    pub(super) fn put(&mut self, member: Member, gradient: CubeTensor) {
        let index = self.pack(&gradient, member.precision);
        let pack = &mut self.packs[index.expect("a pack is open")];
        let (index, offset) = (pack.members.len(), pack.filled);
        kernels::pack(&gradient, &pack.wire, offset, &pack.counts, index);
        pack.members.push(Member { offset, ..member });
        pack.filled = (offset + member.len).next_multiple_of(kernels::WIRE_ALIGNMENT);
    }

    /// A large gradient travels alone, as it is where it has the wire's element type.
    pub(super) fn alone(member: Member, gradient: CubeTensor, room: Room) -> Ready {
        let place = Place::of(&gradient);
        let counts = counters(&gradient, 1);
        let gradients = if gradient.dtype == dtype(member.precision) {
            kernels::count_non_finite(&gradient, &counts, 0);
            into_contiguous_aligned(gradient)
        } else {
            let wire = empty(&gradient, member.len, member.precision);
            kernels::pack(&gradient, &wire, 0, &counts, 0);
            wire
        };
        let parcel = CubeParcel {
            marker: place.marker(&gradients.client),
            gradients,
            counts,
            members: vec![member],
            filled: None,
        };
        (place.device, parcel, room)
    }

    /// Closes all packs. What they hold can leave now.
    pub(super) fn close_packs(&mut self) -> Vec<Ready> {
        self.packs.drain(..).map(Pack::ready).collect()
    }

    /// Ends all sums, whether or not more terms could come.
    pub(super) fn end_sums(&mut self) -> Vec<Ready> {
        self.sums.drain(..).map(Sum::ready).collect()
    }
}

impl Pack {
    fn ready(self) -> Ready {
        let parcel = CubeParcel {
            marker: self.place.marker(&self.wire.client),
            gradients: self.wire,
            counts: self.counts,
            members: self.members,
            filled: Some(self.filled),
        };
        (self.place.device, parcel, self.room)
    }
}

impl Sum {
    fn ready(mut self) -> Ready {
        self.room.send();
        let Self {
            place,
            member,
            value,
            room,
        } = self;
        place.stream.executes(|| Outbox::alone(member, value, room))
    }
}
