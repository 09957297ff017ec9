//! Station 2: gradients from the device to the host while backward goes on.
//!
//! A tap hands its gradient over and goes on. Here it is packed with other small ones, or left as it
//! is when it is large, and queued for the thread that reads this device ([`Reader`]). The bytes of
//! everything between the tap and the host are bounded by a [`Budget`]: CubeCL allocates when work is
//! enqueued, so a host that ran ahead of the device would hold every gradient of the model at once.

mod budget;
mod downloader;
#[cfg(feature = "cubecl-backend")]
mod outbox;
mod parcel;
mod reader;

pub(crate) use downloader::{Downloader, Handover};
pub(crate) use parcel::Arrived;
pub(crate) use reader::Delivery;

use budget::Budget;
use reader::Reader;
