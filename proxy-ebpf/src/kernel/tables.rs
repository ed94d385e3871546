//! Implementation of the traits of [`env`](crate::env) with the kernel's maps, for both address families.

use aya_ebpf::btf_maps::lpm_trie::Key;
use aya_ebpf::helpers::generated::{bpf_get_prandom_u32, bpf_jiffies64};
use proxy_common::affinity::{AffinityEntry, AffinityKey};
use proxy_common::backend::BackendEntry;
use proxy_common::config::NodeConfig;
use proxy_common::flow::{DIRECT_WORDS, FlowKey};
use proxy_common::fragment::{FragmentEntry, FragmentKey};
use proxy_common::node::{Device, NodeAddr, NodeEntry, Tunnel};
use proxy_common::reason::Reason;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::source_range::{SET_BITS, SourceRangeKey};
use proxy_common::stats::{RefusalKey, ServiceStats};
use proxy_common::{Family, V4, V6, maglev};

use super::calls::through_global;
use super::cast::{octets, words};
use super::events;
use super::handle::{Kernel, Scratch};
use super::latency;
use super::maps::{
    AFFINITY, AFFINITY6, BACKEND_STATS, BACKENDS, BACKENDS6, CLOCK_HAND, CLOCK_WINDOW, CONFIG, DEVICES,
    DIRECT_SEEN, Elements as _, FIB_CACHE, FIB_CACHE6, FLOW_INDEX, FLOW_INDEX6, FLOWS, FLOWS6, FRAGMENTS,
    FRAGMENTS6, MAGLEV, MAGLEV_INDEX, NODE, NODE_ADDRS, NODE_ADDRS6, NODE6, PREFILTER, RATE_LIMITS, REASONS,
    REFUSALS, SCRATCH, SCRATCH6, SERVICE_STATS, SERVICES, SERVICES6, SLOTS, SRC_RANGES, SRC_RANGES6, TUNNELS,
    TURNS, XDP_DEVICES,
};
use crate::calls::{flow_calls, node_calls, service_calls};
use crate::context::{Packet, PacketCtx, Tuple};
use crate::env::{
    Affinity, ClockWindow, Counters, EventKind, FibCache, FibEntry, FlowTable, Fragments, Node, RateLimit,
    Services, TokenBucket, Words,
};
use crate::flow::bucket::BucketAt;
use crate::flow::memory::Entry;
use crate::frame::Frame;
use crate::shared::{Raw, Shared, fetch_add};

/// Returns an element of `slots`; `u64::MAX` if there is none. A subprogram, since selections look up slots in loops.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn slot(index: u32) -> u64 {
    // SAFETY: an integer in a map, which is read at once.
    SLOTS.at(index).map_or(u64::MAX, |id| u64::from(unsafe { *id }))
}

macro_rules! tables {
    (
        $family:ty, $module:ident, $services:ident, $backends:ident, $flows:ident, $index:ident, $scratch:ident, $node:ident,
        $node_addrs:ident, $affinity:ident, $src_ranges:ident, $fragments:ident, $fib_cache:ident
    ) => {
        impl Node for Kernel<$family> {
            type Family = $family;

            #[inline(always)]
            fn config(self) -> Option<&'static NodeConfig> {
                CONFIG.get(0)
            }

            #[inline(always)]
            fn measures_latency(self) -> bool {
                latency::is_measured()
            }

            #[inline(always)]
            fn opens_flows(self) -> bool {
                super::hook::opens_flows()
            }

            #[inline(always)]
            fn node(self) -> Option<&'static NodeEntry<Words<Self>>> {
                $node.get(0).map(words)
            }

            #[inline(always)]
            fn node_addr(self, addr: &Words<Self>) -> NodeAddr {
                // A copy on the stack: kernels before 6.4 do not accept memory of a subprogram's argument as a key.
                let key = *addr;
                // SAFETY: an integer, which is read at once; words are the same bytes as octets.
                unsafe { $node_addrs.get(&*(&raw const key).cast()).copied() }.unwrap_or(0)
            }

            #[inline(always)]
            fn tunnel(self, number: u32) -> Option<*const Tunnel> {
                TUNNELS.get(number).map(core::ptr::from_ref)
            }

            #[inline(always)]
            fn device(self, ifindex: u32) -> Device {
                // SAFETY: an integer, which is read at once.
                unsafe { DEVICES.get(ifindex).copied() }.unwrap_or(0)
            }

            #[inline(always)]
            fn is_early_device(self, ifindex: u32) -> bool {
                // SAFETY: only the presence of the entry is checked; its value is not read.
                unsafe { XDP_DEVICES.get(ifindex).is_some() }
            }

            #[inline(always)]
            fn jiffies(self) -> u32 {
                // SAFETY: the helper takes nothing and cannot fail.
                unsafe { bpf_jiffies64() as u32 }
            }

            #[inline(always)]
            fn random(self) -> u32 {
                // SAFETY: the helper takes nothing and cannot fail.
                unsafe { bpf_get_prandom_u32() }
            }

            node_calls!(through_global!($module), Words<Self>);
        }

        impl Scratch for Kernel<$family> {
            #[inline(always)]
            fn scratch(self) -> Option<&'static mut PacketCtx<Words<Self>>> {
                // SAFETY: this CPU's own value, and the program asks for it once.
                $scratch.get_ptr_mut(0).map(|scratch| unsafe { &mut *scratch })
            }
        }

        impl Services for Kernel<$family> {
            #[inline(always)]
            fn service_entry(self, key: &ServiceKey<Words<Self>>) -> Option<*const ServiceEntry> {
                // SAFETY: readers use volatile loads, and check the tag before and after.
                unsafe { $services.get(octets(key)).map(core::ptr::from_ref) }
            }

            #[inline(always)]
            fn slot(self, index: u32) -> Option<u32> {
                u32::try_from(slot(index)).ok()
            }

            #[inline(always)]
            fn maglev_base(self, index: u32, number: u32) -> u32 {
                let word = MAGLEV_INDEX.at(maglev::index_word(index, number));
                // SAFETY: an integer in a map, which is read at once.
                word.map_or(0, |word| maglev::base_in(unsafe { *word }, number))
            }

            #[inline(always)]
            fn maglev(self, index: u32) -> Option<u64> {
                // SAFETY: an integer in a map, which is read at once.
                MAGLEV.at(index).map(|word| unsafe { *word })
            }

            #[inline(always)]
            fn turns(self, service: u32) -> Option<*mut u64> {
                TURNS.at(service)
            }

            #[inline(always)]
            fn backend(self, id: u32) -> Option<&'static BackendEntry<Words<Self>>> {
                // SAFETY: a map value stays valid as long as the program runs; the agent writes it as a whole.
                $backends.at(id).map(|entry| words(unsafe { &*entry }))
            }

            #[inline(always)]
            fn prefilter(self, word: u32) -> Option<u64> {
                PREFILTER.get(word).copied()
            }

            #[inline(always)]
            fn admits(self, set: u32, client: &Words<Self>) -> bool {
                let data = SourceRangeKey { set, addr: *client };
                let bits = SET_BITS + 8 * size_of::<<$family as Family>::Addr>() as u32;
                $src_ranges.get(&Key::new(bits, *octets(&data))).is_some()
            }

            service_calls!(through_global!($module), Words<Self>);
        }

        impl Affinity for Kernel<$family> {
            #[inline(always)]
            fn affinity(self, key: &AffinityKey<Words<Self>>) -> Option<*mut AffinityEntry> {
                $affinity.get_ptr_mut(octets(key))
            }

            #[inline(always)]
            fn put_affinity(self, key: &AffinityKey<Words<Self>>, entry: &AffinityEntry) -> Result<(), i32> {
                $affinity.insert(octets(key), entry, 0)
            }
        }

        impl FlowTable for Kernel<$family> {
            type Entry = Entry<Words<Self>>;
            type Bucket = BucketAt;

            #[inline(always)]
            fn entry(self, index: u32) -> Option<Self::Entry> {
                // SAFETY: a map value, whose octets are the same bytes as words (`proxy_common::abi` proves it).
                $flows.at(index).map(|entry| unsafe { Entry::new(entry.cast()) })
            }

            #[inline(always)]
            fn bucket(self, number: u32) -> Option<BucketAt> {
                // SAFETY: a map value.
                $index.at(number).map(|bucket| unsafe { BucketAt::new(bucket) })
            }

            #[inline(always)]
            fn clock_window(self) -> Option<*mut ClockWindow> {
                CLOCK_WINDOW.get_ptr_mut(<$family>::INDEX)
            }

            #[inline(always)]
            fn advance_clock_hand(self, by: u32) -> Option<u64> {
                let hand = CLOCK_HAND.get_ptr_mut(<$family>::INDEX)?;
                // SAFETY: a map value, aligned to eight bytes.
                Some(unsafe { fetch_add(hand, u64::from(by)) })
            }

            #[inline(always)]
            fn direct_seen(self, slot: u32) -> Option<impl Shared<Value = u32>> {
                let number = <$family>::INDEX * DIRECT_WORDS + slot;
                // SAFETY: a map value, aligned.
                DIRECT_SEEN.get_ptr_mut(number).map(|seen| unsafe { Raw::new(seen) })
            }

            #[inline(always)]
            fn syn_begun(self, flow: u32) {
                latency::flow_begun(flow << 1 | <$family>::INDEX);
            }

            #[inline(always)]
            fn syn_answered(self, flow: u32, service: u32, backend: u32, refused: bool) {
                latency::syn_answered(flow << 1 | <$family>::INDEX, service, backend, u32::from(refused));
            }

            #[inline(always)]
            fn syn_again(self, service: u32, backend: u32) {
                latency::syn_again(service, backend);
            }

            flow_calls!(through_global!($module), Words<Self>);
        }

        impl Fragments for Kernel<$family> {
            #[inline(always)]
            fn fragment(self, key: &FragmentKey<Words<Self>>) -> Option<FragmentEntry> {
                // SAFETY: copied at once. If the entry is reused meanwhile, the fragment goes to a wrong destination, as
                // any fragment may whose identification is repeated.
                unsafe { $fragments.get(key).copied() }
            }

            #[inline(always)]
            fn put_fragment(self, key: &FragmentKey<Words<Self>>, entry: &FragmentEntry) -> Result<(), i32> {
                $fragments.insert(key, entry, 0)
            }
        }

        impl FibCache for Kernel<$family> {
            #[inline(always)]
            fn fib_entry(self, number: u32) -> Option<*mut FibEntry<Words<Self>>> {
                $fib_cache.get_ptr_mut(number)
            }
        }

        impl RateLimit for Kernel<$family> {
            #[inline(always)]
            fn token_bucket(self, number: u32) -> Option<*mut TokenBucket> {
                RATE_LIMITS.get_ptr_mut(number)
            }
        }

        impl Counters for Kernel<$family> {
            #[inline(always)]
            fn service_stats(self, id: u32) -> Option<*mut ServiceStats> {
                SERVICE_STATS.at(id)
            }

            #[inline(always)]
            fn backend_connections(self, id: u32) -> Option<*mut u64> {
                BACKEND_STATS.at(id)
            }

            #[inline(always)]
            fn reason(self, reason: Reason) -> Option<*mut u64> {
                REASONS.get_ptr_mut(reason as u32)
            }

            #[inline(always)]
            fn refusals(self, key: &RefusalKey) -> Option<*mut u64> {
                REFUSALS.get_ptr_mut(key)
            }

            #[inline(always)]
            fn begin_refusals(self, key: &RefusalKey) -> Result<(), i32> {
                REFUSALS.insert(key, 0u64, u64::from(aya_ebpf::bindings::BPF_NOEXIST))
            }

            #[inline(always)]
            fn notify<F: Frame>(self, frame: F, ctx: &PacketCtx<Words<Self>>, service: u32, what: EventKind) {
                if events::has_listeners(what) {
                    events::packet(self, frame.ifindex(), ctx, service, what);
                }
            }

            #[inline(always)]
            fn notify_reason(self, service: u32, why: Reason) {
                if events::has_listeners(EventKind::Reason(why)) {
                    events::reason_event(service, why as u32);
                }
            }
        }
    };
}

tables! {
    V4, v4, SERVICES, BACKENDS, FLOWS, FLOW_INDEX, SCRATCH, NODE, NODE_ADDRS, AFFINITY, SRC_RANGES, FRAGMENTS, FIB_CACHE
}
tables! {
    V6, v6, SERVICES6, BACKENDS6, FLOWS6, FLOW_INDEX6, SCRATCH6, NODE6, NODE_ADDRS6, AFFINITY6, SRC_RANGES6, FRAGMENTS6,
    FIB_CACHE6
}
