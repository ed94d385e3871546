//! Compile-time checks that the layouts of the maps have not changed ([`crate::version`]).

use core::mem::{align_of, size_of};

use crate::{
    Address,
    affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey},
    backend::BackendEntry,
    config::{NodeConfig, PortRange},
    event::{Event, Lease, Monitor},
    flow::{Bucket, FlowEntry},
    fragment::{FragmentEntry, FragmentKey},
    latency::{ExampleKey, LatencyEntry, LatencyKey, SocketExample},
    name::PortName,
    node::{Cidr, DeviceSource, IpsecPolicy, NodeEntry, Tunnel},
    service::{ServiceEntry, ServiceKey},
    socket::{SocketEntry, SocketKey, SocketPeer, SocketPeers, SocketStorage, TranslatedSocket},
    source_range::SourceRangeKey,
    stats::{RefusalKey, ServiceStats},
};

/// A type without padding, of which every bit pattern is a valid value: it can be read from and written to a map.
///
/// # Safety
/// The type is `Copy` and `'static`, has no padding bytes, and every bit pattern is a valid value.
pub unsafe trait Plain: Copy + 'static {}

macro_rules! sizes {
    ($($type:ty: $size:literal = $($field:literal)+;)+) => {$(
        const _: () = assert!(size_of::<$type>() == $size && $size == 0 $(+ $field)+, "padding or a changed layout");
        const _: () = assert!(align_of::<$type>() <= 8, "the kernel aligns values to eight bytes");
    )+};
}

macro_rules! plain {
    ($($type:ty: $size:literal = $($field:literal)+;)+) => {$(
        sizes! { $type: $size = $($field)+; }
        // SAFETY: the sizes of the fields add up to the size of the type, and all of them are integers.
        unsafe impl Plain for $type {}
        // SAFETY: as for `Plain`.
        #[cfg(feature = "user")]
        unsafe impl aya::Pod for $type {}
    )+};
}

/// Types that hold addresses: each has the same layout with addresses as words and as octets, so that one pointer type can be
/// cast to the other. Their sizes are in `sizes`.
macro_rules! plain_of_addresses {
    ($($name:ident)+) => {$(
        const _: () = assert!(
            size_of::<$name<[u8; 4]>>() == size_of::<$name<[u32; 1]>>()
                && align_of::<$name<[u8; 4]>>() == align_of::<$name<[u32; 1]>>()
                && size_of::<$name<[u8; 16]>>() == size_of::<$name<[u32; 4]>>()
                && align_of::<$name<[u8; 16]>>() == align_of::<$name<[u32; 4]>>(),
            "octets and words are laid out differently"
        );
        // SAFETY: the four types of addresses are integers, and `sizes` and the check above cover all four layouts.
        unsafe impl<A: Address> Plain for $name<A> {}
        // SAFETY: as for `Plain`.
        #[cfg(feature = "user")]
        unsafe impl<A: Address> aya::Pod for $name<A> {}
    )+};
}

plain_of_addresses! {
    ServiceKey BackendEntry FlowEntry Cidr IpsecPolicy DeviceSource NodeEntry AffinityKey SourceRangeKey FragmentKey
    SocketKey SocketEntry
}

sizes! {
    ServiceKey<[u8; 4]>: 8 = 4 2 1 1;
    ServiceKey<[u8; 16]>: 20 = 16 2 1 1;
    BackendEntry<[u8; 4]>: 16 = 4 2 1 1 4 4;
    BackendEntry<[u8; 16]>: 28 = 16 2 1 1 4 4;
    FlowEntry<[u8; 4]>: 64 = 8 4 4 4 4 2 2 2 2 1 1 2 4 4 4 4 8 4;
    FlowEntry<[u8; 16]>: 112 = 8 16 16 16 16 2 2 2 2 1 1 2 4 4 4 4 8 4;
    Cidr<[u8; 4]>: 8 = 4 4;
    Cidr<[u8; 16]>: 32 = 16 16;
    IpsecPolicy<[u8; 4]>: 16 = 8 8;
    IpsecPolicy<[u8; 16]>: 64 = 32 32;
    DeviceSource<[u8; 4]>: 8 = 4 4;
    DeviceSource<[u8; 16]>: 20 = 4 16;
    NodeEntry<[u8; 4]>: 412 = 4 8 64 4 256 4 4 64 4;
    NodeEntry<[u8; 16]>: 1504 = 16 32 256 4 1024 4 4 160 4;
    AffinityKey<[u8; 4]>: 8 = 4 4;
    AffinityKey<[u8; 16]>: 20 = 16 4;
    SourceRangeKey<[u8; 4]>: 8 = 4 4;
    SourceRangeKey<[u8; 16]>: 20 = 4 16;
    FragmentKey<[u32; 1]>: 16 = 4 4 4 4;
    FragmentKey<[u32; 4]>: 40 = 16 16 4 4;
    SocketKey<[u8; 4]>: 16 = 8 4 2 1 1;
    SocketKey<[u8; 16]>: 32 = 8 16 2 1 1 4;
    SocketEntry<[u8; 4]>: 20 = 4 2 2 4 4 4;
    SocketEntry<[u8; 16]>: 32 = 16 2 2 4 4 4;
}

plain! {
    ServiceEntry: 28 = 4 4 4 4 4 4 2 1 1;
    Bucket: 64 = 60 2 2;
    PortRange: 4 = 2 2;
    NodeConfig: 272 = 4 4 4 4 4 4 4 4 4 4 4 4 32 8 12 20 4 4 8 24 16 8 8 32 8 32 4 4;
    Tunnel: 36 = 16 16 4;
    NetnsAffinityKey: 16 = 8 4 4;
    AffinityEntry: 8 = 4 4;
    FragmentEntry: 12 = 2 2 2 2 4;
    SocketStorage: 48 = 16 16 2 2 4 4 1 1 1 1;
    SocketPeer: 48 = 16 16 2 2 4 4 1 1 2;
    SocketPeers: 384 = 384;
    TranslatedSocket: 56 = 8 48;
    ServiceStats: 40 = 8 8 8 8 8;
    RefusalKey: 8 = 4 4;
    LatencyKey: 8 = 4 4;
    LatencyEntry: 184 = 160 8 8 8;
    ExampleKey: 8 = 4 4;
    SocketExample: 56 = 8 8 16 16 2 2 4;
    PortName: 196 = 2 1 1 192;
    Event: 96 = 8 8 16 16 16 4 4 4 4 4 2 2 2 1 1 1 1 2;
    Lease: 16 = 8 8;
    Monitor: 296 = 8 8 8 8 8 256;
}

// SAFETY: the type is an integer.
unsafe impl Plain for u32 {}
// SAFETY: the type is an integer.
unsafe impl Plain for u64 {}
// SAFETY: the type is an array of octets.
unsafe impl Plain for [u8; 4] {}
// SAFETY: the type is an array of octets.
unsafe impl Plain for [u8; 16] {}
