//! Access to the entries of the flow table: the algorithms use the trait [`EntryRef`]; [`Entry`] implements it for a map.

use core::ffi::c_void;

use proxy_common::flow::{
    DIRECTION_FORWARD, DIRECTION_REPLY, FlowEntry, FlowKey, NO_POSITION, TAG_SHIFT, frontend_window,
};
use proxy_common::{Address, PROTO_UDP};

use crate::context::{NatPlan, Packet, Tuple};
use crate::shared::{Exchange, Raw, Shared, after};

/// Contents for a claimed entry.
pub struct NewFlow<'a, A> {
    /// The packet that begins the flow.
    pub packet: &'a Packet<A>,
    /// The flow's backend and reply key.
    pub plan: &'a NatPlan<A>,
    /// Id of the Service port.
    pub service: u32,
    /// Low 32 bits of jiffies.
    pub now: u32,
}

/// An entry of the flow table.
pub trait EntryRef<A: Address>: Copy {
    /// The state word, which tells which flow or CPU owns the entry. See [`FlowEntry`].
    fn state(self) -> impl Exchange<Value = u64>;
    /// Returns the same entry; all reads through it are ordered after the reads from which `witness` was computed.
    #[must_use]
    fn after(self, witness: u64) -> Self;
    /// Returns 0 if the key is one of the flow's two keys, otherwise another number. The result is also a witness of the
    /// fields that were read.
    fn differs_from(self, key: &FlowKey<A>) -> u64;
    /// Returns 0 if both entries, one of which is claimed, have the same key in this direction, otherwise another number.
    fn differs_from_entry(self, other: Self, direction: u8) -> u64;
    /// Returns the tuple to which a client's packet is translated, and a witness of the fields that were read.
    fn to_backend(self) -> (Tuple<A>, u64);
    /// Returns the tuple to which a backend's packet is translated, and a witness of the fields that were read.
    fn to_client(self) -> (Tuple<A>, u64);
    /// The key of a direction.
    fn key(self, direction: u8) -> FlowKey<A>;
    /// Fills a claimed entry, except for the state word.
    fn fill(self, new: &NewFlow<'_, A>);
    /// Gives a claimed entry another source port.
    fn set_source_port(self, port: u16);
    /// The source port that the backend sees.
    fn source_port(self) -> u16;
    /// The IP protocol.
    fn proto(self) -> u8;
    /// Id of the Service port.
    fn service(self) -> u32;
    /// Id, address and port of the backend.
    fn backend(self) -> (u32, A, u16);
    /// Id of the backend.
    fn backend_id(self) -> u32;
    /// Low 32 bits of jiffies at the first packet of the flow.
    fn created(self) -> u32;
    /// Low 32 bits of jiffies at the last packet of the flow.
    fn last_seen(self) -> impl Shared<Value = u32>;
    /// The upper half of the sequence number of a direction.
    fn seq(self, direction: u8) -> impl Shared<Value = u16>;
    /// Position and tag of the key of a direction.
    fn position(self, direction: u8) -> (u32, u32);
    /// Stores position and tag of the key of a direction in a claimed entry.
    fn set_position(self, direction: u8, position: u32, tag: u32);
    /// Prefetches the entry's cache line.
    fn prefetch(self);
}

/// An entry in a map.
pub struct Entry<A>(*mut FlowEntry<A>);

impl<A> Clone for Entry<A> {
    #[inline(always)]
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Entry<A> {}

macro_rules! field {
    ($entry:expr, $field:ident) => {
        // SAFETY: a field of an entry; the constructor of the handle requires a valid one.
        unsafe { (&raw const (*$entry.0).$field).read_volatile() }
    };
}

macro_rules! set_field {
    ($entry:expr, $field:ident, $value:expr) => {
        // SAFETY: a field of an entry; the constructor of the handle requires a valid one.
        unsafe { (&raw mut (*$entry.0).$field).write_volatile($value) }
    };
}

/// Reads an address field word by word: for a whole array the compiler would call functions that BPF programs do not have.
macro_rules! addr {
    ($entry:expr, $field:ident) => {
        // SAFETY: a field of an entry; the constructor of the handle requires a valid one, aligned to words.
        unsafe { load_words(&raw const (*$entry.0).$field) }
    };
}

/// # Safety
/// `from` points to an address in shared memory, aligned to words.
#[inline(always)]
unsafe fn load_words<A: Address>(from: *const A) -> A {
    let mut words = [0; 4];
    let mut number = 0;
    while number < size_of::<A>() / size_of::<u32>() {
        // SAFETY: the word is inside the address.
        words[number] = unsafe { from.cast::<u32>().add(number).read_volatile() };
        number += 1;
    }
    A::from_words(words)
}

/// Number of words in a key: both addresses, and one word for both ports.
const fn key_words<A>() -> usize {
    2 * size_of::<A>() / size_of::<u32>() + 1
}

#[inline(always)]
fn witness<A: Address>(a: &A, b: &A) -> u64 {
    u64::from(a.words()[0] | b.words()[0])
}

impl<A> Entry<A> {
    /// Returns a handle for the entry at this address.
    ///
    /// # Safety
    /// The address must be valid as long as the handle is used, and `A` must consist of words.
    #[inline(always)]
    pub unsafe fn new(address: *mut FlowEntry<A>) -> Self {
        Self(address)
    }

    /// Returns base addresses for the words of a key in the entry: one for both addresses, one for the ports. The number of
    /// a word in a [`FlowKey`] is added to either base. Without a branch: the fields of the forward and the reply key are
    /// adjacent.
    #[inline(always)]
    fn key_words(self, direction: u8) -> [*const u32; 2] {
        let side = usize::from(direction & 1);
        // SAFETY: inside the entry, whose ports begin at a word boundary.
        unsafe {
            let addresses = (&raw const (*self.0).client).cast::<u32>().add(side * (key_words::<A>() - 1));
            let ports = (&raw const (*self.0).client_port).cast::<c_void>().cast::<u32>().add(side);
            [addresses, ports.sub(key_words::<A>() - 1)]
        }
    }
}

impl<A: Address> EntryRef<A> for Entry<A> {
    #[inline(always)]
    fn state(self) -> impl Exchange<Value = u64> {
        // SAFETY: inside the entry, aligned to eight bytes.
        unsafe { Raw::new(&raw mut (*self.0).state) }
    }

    #[inline(always)]
    fn after(self, witness: u64) -> Self {
        // SAFETY: the same address.
        Self(unsafe { self.0.byte_add(after(witness)) })
    }

    #[inline(always)]
    fn differs_from(self, key: &FlowKey<A>) -> u64 {
        let own = self.key_words(key.direction);
        let mut difference = 0;
        let mut number = 0;
        while number < key_words::<A>() {
            // SAFETY: inside the entry, and inside the key, which begins with the same words.
            unsafe {
                let other = core::ptr::from_ref(key).cast::<u32>().add(number).read();
                difference |= own[number / (key_words::<A>() - 1)].add(number).read_volatile() ^ other;
            }
            number += 1;
        }
        u64::from(difference) | u64::from(field!(self, proto) ^ key.proto)
    }

    #[inline(always)]
    fn differs_from_entry(self, other: Self, direction: u8) -> u64 {
        let (own, others) = (self.key_words(direction), other.key_words(direction));
        let mut difference = 0;
        let mut number = 0;
        while number < key_words::<A>() {
            let part = number / (key_words::<A>() - 1);
            // SAFETY: inside both entries.
            unsafe {
                difference |=
                    own[part].add(number).read_volatile() ^ others[part].add(number).read_volatile();
            }
            number += 1;
        }
        u64::from(difference) | u64::from(field!(self, proto) ^ field!(other, proto))
    }

    #[inline(always)]
    fn to_backend(self) -> (Tuple<A>, u64) {
        let tuple = Tuple {
            src: addr!(self, source),
            dst: addr!(self, backend),
            src_port: field!(self, source_port),
            dst_port: field!(self, backend_port),
        };
        let seen = witness(&tuple.src, &tuple.dst) | u64::from(tuple.src_port | tuple.dst_port);
        (tuple, seen)
    }

    #[inline(always)]
    fn to_client(self) -> (Tuple<A>, u64) {
        let tuple = Tuple {
            src: addr!(self, frontend),
            dst: addr!(self, client),
            src_port: field!(self, frontend_port),
            dst_port: field!(self, client_port),
        };
        let seen = witness(&tuple.src, &tuple.dst) | u64::from(tuple.src_port | tuple.dst_port);
        (tuple, seen)
    }

    #[inline(always)]
    fn key(self, direction: u8) -> FlowKey<A> {
        if direction == DIRECTION_FORWARD {
            FlowKey {
                src: addr!(self, client),
                dst: addr!(self, frontend),
                src_port: field!(self, client_port),
                dst_port: field!(self, frontend_port),
                proto: field!(self, proto),
                direction,
                reserved: 0,
            }
        } else {
            FlowKey {
                src: addr!(self, backend),
                dst: addr!(self, source),
                src_port: field!(self, backend_port),
                dst_port: field!(self, source_port),
                proto: field!(self, proto),
                direction: DIRECTION_REPLY,
                reserved: 0,
            }
        }
    }

    #[inline(always)]
    fn fill(self, new: &NewFlow<'_, A>) {
        let (packet, plan) = (new.packet, new.plan);
        let first =
            if packet.key.proto == PROTO_UDP { frontend_window(new.now) } else { (packet.seq >> 16) as u16 };
        // SAFETY: the entry is claimed: no other CPU writes these fields, and readers check the state again.
        unsafe {
            (*self.0).client = packet.key.src;
            (*self.0).frontend = packet.key.dst;
            (*self.0).backend = plan.reply.src;
            (*self.0).source = plan.reply.dst;
            (*self.0).client_port = packet.key.src_port;
            (*self.0).frontend_port = packet.key.dst_port;
            (*self.0).backend_port = plan.reply.src_port;
            (*self.0).source_port = plan.reply.dst_port;
            (*self.0).proto = packet.key.proto;
            (*self.0).reserved = 0;
            (*self.0).tags = [0; 2];
            (*self.0).service = new.service;
            (*self.0).backend_id = plan.backend_id;
            (*self.0).created = new.now;
            (*self.0).last_seen = new.now;
            (*self.0).positions = [NO_POSITION; 2];
            (*self.0).seq = [first, 0];
        }
    }

    #[inline(always)]
    fn set_source_port(self, port: u16) {
        set_field!(self, source_port, port);
    }

    #[inline(always)]
    fn source_port(self) -> u16 {
        field!(self, source_port)
    }

    #[inline(always)]
    fn proto(self) -> u8 {
        field!(self, proto)
    }

    #[inline(always)]
    fn service(self) -> u32 {
        field!(self, service)
    }

    #[inline(always)]
    fn backend(self) -> (u32, A, u16) {
        (field!(self, backend_id), addr!(self, backend), field!(self, backend_port))
    }

    #[inline(always)]
    fn backend_id(self) -> u32 {
        field!(self, backend_id)
    }

    #[inline(always)]
    fn created(self) -> u32 {
        field!(self, created)
    }

    #[inline(always)]
    fn last_seen(self) -> impl Shared<Value = u32> {
        // SAFETY: inside the entry, aligned.
        unsafe { Raw::new(&raw mut (*self.0).last_seen) }
    }

    #[inline(always)]
    fn seq(self, direction: u8) -> impl Shared<Value = u16> {
        // SAFETY: inside the entry, aligned; the mask keeps it inside the array.
        unsafe { Raw::new((&raw mut (*self.0).seq).cast::<u16>().add(usize::from(direction & 1))) }
    }

    #[inline(always)]
    fn position(self, direction: u8) -> (u32, u32) {
        let side = usize::from(direction & 1);
        // SAFETY: inside the entry; the mask keeps it inside the arrays.
        unsafe {
            let position = (&raw const (*self.0).positions).cast::<u32>().add(side).read_volatile();
            let tag = (&raw const (*self.0).tags).cast::<u8>().add(side).read_volatile();
            (position, u32::from(tag) << TAG_SHIFT)
        }
    }

    #[inline(always)]
    fn set_position(self, direction: u8, position: u32, tag: u32) {
        let side = usize::from(direction & 1);
        // SAFETY: as in `position`.
        unsafe {
            (&raw mut (*self.0).positions).cast::<u32>().add(side).write_volatile(position);
            (&raw mut (*self.0).tags).cast::<u8>().add(side).write_volatile((tag >> TAG_SHIFT) as u8);
        }
    }

    #[inline(always)]
    fn prefetch(self) {
        // BPF has no prefetch instruction; a store does not wait for the cache line, and this byte is always zero.
        set_field!(self, reserved, 0);
    }
}
