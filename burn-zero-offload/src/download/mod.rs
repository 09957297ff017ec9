//! Station 2: gradients from the device to the host while backward goes on.

mod reader;

pub(crate) use reader::Reader;
