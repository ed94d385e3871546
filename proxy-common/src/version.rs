//! The version of the layouts.

/// The version, which increases with every change of a layout or of its meaning. It is part of the pin path.
pub const ABI_VERSION: u32 = 1;
