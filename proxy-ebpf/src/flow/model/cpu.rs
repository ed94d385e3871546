//! Actions of the model's CPUs, and the invariants that are checked after all CPUs are done.

use std::boxed::Box;
use std::vec::Vec;

use loom::thread;
use proxy_common::PROTO_TCP;
use proxy_common::connections::open;
use proxy_common::conntrack::{is_closed, is_counted, tcp};
use proxy_common::flow::{
    BUCKET_WORDS, DIRECTION_FORWARD, DIRECTION_REPLY, FlowKey, SLOT_PENDING, STATE_CLAIMED, STATE_COUNTS,
    STATE_SNAT, STATE_USED, bits_of, flow_of, slot_of,
};

use super::memory::{Model, Table};
use crate::context::{PacketCtx, Tuple};
use crate::env::{FlowTable as _, Node as _, Time};
use crate::flow::bucket::BucketRef as _;
use crate::flow::memory::EntryRef as _;
use crate::flow::open::{self, Opened};
use crate::flow::track::{self, Tracked};
use crate::shared::{Exchange as _, Shared as _};

pub type A = [u32; 1];

/// The flow that a packet requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connection {
    pub client: u16,
    pub frontend: u32,
    pub backend: u32,
    pub snat: bool,
}

impl Connection {
    pub const fn new(client: u16, frontend: u32, backend: u32) -> Self {
        Self { client, frontend, backend, snat: false }
    }

    pub fn key(self) -> FlowKey<A> {
        FlowKey {
            src: [1],
            dst: [self.frontend],
            src_port: self.client,
            dst_port: 80,
            proto: PROTO_TCP,
            direction: DIRECTION_FORWARD,
            reserved: 0,
        }
    }

    /// Returns the reply key before any collision.
    pub fn reply(self) -> FlowKey<A> {
        let (dst, dst_port) = if self.snat { ([9], 2000) } else { ([1], self.client) };
        FlowKey {
            src: [self.backend],
            dst,
            src_port: 8080,
            dst_port,
            proto: PROTO_TCP,
            direction: DIRECTION_REPLY,
            reserved: 0,
        }
    }
}

/// The tuple to which a packet was translated; `None` if it was dropped.
pub type TranslatedTuple = Option<Tuple<A>>;

fn time<const S: u32>(maps: Model<S>) -> Time {
    maps.time().unwrap()
}

/// Returns the context of a packet of this flow.
pub fn context<const S: u32>(maps: Model<S>, wanted: Connection, flags: u16) -> PacketCtx<A> {
    let time = time(maps);
    let mut ctx = PacketCtx::EMPTY;
    ctx.packet.key = wanted.key();
    ctx.packet.tcp_flags = flags;
    ctx.packet.seq = 5 << 16;
    ctx.hash = time.hash(&ctx.packet.key);
    ctx.plan.reply = wanted.reply();
    ctx.plan.reply_hash = time.hash(&ctx.plan.reply);
    ctx.plan.backend_id = wanted.backend;
    ctx.plan.bits = STATE_COUNTS | if wanted.snat { STATE_SNAT } else { 0 };
    ctx
}

/// Processes a SYN, as `stage::open_flow` does.
pub fn syn<const S: u32>(maps: Model<S>, wanted: Connection) -> TranslatedTuple {
    for _turn in 0..4 {
        let mut ctx = context(maps, wanted, tcp::SYN);
        match open::open(maps, &mut ctx, 1, time(maps)) {
            Ok(Opened::Begun) if wanted.snat => return data(maps, wanted),
            Ok(Opened::Begun) => return Some(Tuple::to_backend(&ctx.plan.reply)),
            Ok(Opened::Exists) => {
                if let Some(to) = data(maps, wanted) {
                    return Some(to);
                }
            }
            Err(_) => return None,
        }
    }
    None
}

/// Processes a segment of a flow, as `stage::established` does. Returns `None` also if there is no such flow.
pub fn data<const S: u32>(maps: Model<S>, wanted: Connection) -> TranslatedTuple {
    found(maps, &wanted.key())?.to_backend()
}

pub fn found<const S: u32>(maps: Model<S>, key: &FlowKey<A>) -> Option<Tracked<Model<S>>> {
    let time = time(maps);
    track::find(maps, key, time.hash(key), time)
}

/// Processes a segment with these flags, which changes the state of its flow.
pub fn touch<const S: u32>(maps: Model<S>, wanted: Connection, flags: u16, direction: u8) {
    let key = if direction == DIRECTION_FORWARD { wanted.key() } else { wanted.reply() };
    if let Some(flow) = found(maps, &key) {
        let ctx = context(maps, wanted, flags);
        flow.touch(&ctx.packet, direction, time(maps));
    }
}

/// Removes a flow, as a SYN that finds it closed does.
pub fn remove<const S: u32>(maps: Model<S>, wanted: Connection) -> bool {
    found(maps, &wanted.key()).is_some_and(|flow| flow.remove())
}

/// Removes the reply key of a flow from the index, as a CPU that stopped between both keys leaves it.
pub fn lose_reply_key<const S: u32>(maps: Model<S>, wanted: Connection) {
    let flow = found(maps, &wanted.key()).unwrap();
    let (position, tag) = flow.entry.position(DIRECTION_REPLY);
    let slot = maps.bucket(position / BUCKET_WORDS).unwrap().slot(position);
    slot.compare_exchange(slot_of(tag, flow.index), 0);
}

/// A flow that is in use after all CPUs are done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Left {
    pub bits: u32,
    pub forward: FlowKey<A>,
    pub reply: FlowKey<A>,
    pub seq: [u16; 2],
}

/// Returns the flows that are left. Checks that each key in the index belongs to a flow, and that each flow has both of its
/// keys in the index, shared with no other flow.
pub fn left<const S: u32>(maps: Model<S>, table: &Table) -> Vec<Left> {
    let mut keys: Vec<(FlowKey<A>, u32, u32)> = Vec::new();
    let mut flows = Vec::new();
    for index in 0..table.entries.len() as u32 {
        let entry = maps.entry(index).unwrap();
        let bits = bits_of(entry.state().load());
        if bits == 0 {
            continue;
        }
        assert_eq!(bits & (STATE_USED | STATE_CLAIMED), STATE_USED, "entry {index} stays claimed");
        for direction in [DIRECTION_FORWARD, DIRECTION_REPLY] {
            let key = entry.key(direction);
            assert!(!keys.iter().any(|(other, ..)| *other == key), "two flows have {key:?}");
            let (position, tag) = entry.position(direction);
            keys.push((key, position, slot_of(tag, index)));
            assert_eq!(tag, proxy_common::flow::tag(time(maps).hash(&key)), "the tag of {key:?}");
            let found = crate::flow::index::find(maps, &key, time(maps).hash(&key));
            // A port in quarantine has no forward key.
            if direction == DIRECTION_FORWARD
                && bits & STATE_SNAT != 0
                && is_closed(bits)
                && found as u32 != index
            {
                keys.pop();
                continue;
            }
            assert_eq!(found as u32, index, "{key:?} of entry {index} leads to {}", found as u32);
        }
        let seq = [0, 1].map(|direction| entry.seq(direction).load());
        flows.push(Left { bits, forward: entry.key(0), reply: entry.key(1), seq });
    }
    for number in 0..table.buckets.len() as u32 {
        for slot in 0..S {
            let word = maps.bucket(number).unwrap().slot(slot).load();
            let position = number * BUCKET_WORDS + slot;
            let owner = keys.iter().any(|(_, at, value)| (*at, *value) == (position, word));
            assert!(word == 0 || owner, "slot {position} is left behind: {word:#x}, entry {}", flow_of(word));
            assert_eq!(word & SLOT_PENDING, 0);
        }
    }
    flows
}

/// The action of one CPU.
pub type Action<T, const S: u32> = fn(Model<S>) -> T;

/// The sizes of a table: entries and buckets.
#[derive(Clone, Copy)]
pub struct Size {
    pub entries: u32,
    pub buckets: u32,
}

/// Runs the actions in parallel, each on its own CPU, in all orders with at most `preemptions` preemptions. `before` runs
/// first and alone, at jiffies 1; the actions run at jiffies `now`. `check` gets the outcomes and the flows that are left.
/// The open ones of these flows must match the count of open connections.
pub fn explore<T, const S: u32, const N: usize>(
    size: Size,
    preemptions: usize,
    now: u32,
    before: fn(Model<S>),
    actions: [Action<T, S>; N],
    check: fn([T; N], &[Left]),
) where
    T: Send + 'static,
{
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(preemptions));
    builder.max_branches = 20_000;
    let runs = std::sync::Arc::new(core::sync::atomic::AtomicU32::new(0));
    let counter = runs.clone();
    let began = std::time::Instant::now();
    builder.check(move || {
        counter.fetch_add(1, core::sync::atomic::Ordering::Relaxed);
        let table: Box<Table> = Table::new(size.entries, size.buckets, S);
        before(table.cpu(0, 1));
        let mut number = 0;
        let threads = actions.map(|action| {
            number += 1;
            let maps = table.cpu::<S>(number, now);
            thread::spawn(move || action(maps))
        });
        let outcomes = threads.map(|thread| thread.join().unwrap());
        let left = left(table.cpu::<S>(0, now), &table);
        let counted = left.iter().filter(|flow| is_counted(flow.bits)).count();
        let word = table.open.load(core::sync::atomic::Ordering::SeqCst);
        assert_eq!(open(word), counted.cast_signed() as i32, "open connections");
        check(outcomes, &left);
    });
    let runs = runs.load(core::sync::atomic::Ordering::Relaxed);
    std::println!("{runs} orders in {:?}", began.elapsed());
}
