//! Trait methods that are subprograms in the kernel, for handles that need no subprograms: each method calls its function
//! directly.

/// Methods of [`Health`](crate::env::Health) that are subprograms in the kernel, as direct calls.
macro_rules! calls_health {
    () => {
        fn rank_slow(self, id: u32, client: u32, random: u32) -> u32 {
            $crate::select::health::rank_slow(self, id, client, random)
        }

        fn note_failure(self, id: u32, client: u32, failure: u32) -> u32 {
            $crate::select::health::note_failure(self, id, client, failure)
        }

        fn answered(self, id: u32) {
            $crate::select::health::answered(self, id);
        }
    };
}

/// Methods of [`Services`](crate::env::Services) that are subprograms in the kernel, as direct calls.
macro_rules! calls_selection {
    () => {
        fn packet_frontend(
            self,
            ctx: &mut $crate::context::PacketCtx<$crate::env::Words<Self>>,
            outside: bool,
        ) {
            $crate::select::lookup::packet_frontend(self, ctx, outside);
        }

        fn first_id(self, service: &proxy_common::service::ServiceEntry, selector: u32) -> u32 {
            $crate::select::backend::first_id(self, service, selector)
        }

        fn previous_id(self, service: &proxy_common::service::ServiceEntry, selector: u32) -> u32 {
            $crate::select::backend::previous_id(self, service, selector)
        }

        fn rank(
            self,
            service: &proxy_common::service::ServiceEntry,
            id: u32,
            client: u32,
            random: u32,
        ) -> u32 {
            $crate::select::backend::rank(self, service, id, client, random)
        }

        fn has_tag(self, service: &proxy_common::service::ServiceEntry, id: u32, tag: u32, of: u32) -> u32 {
            $crate::select::backend::has_tag(self, service, id, tag, of)
        }

        fn select_for(
            self,
            ctx: &mut $crate::context::PacketCtx<$crate::env::Words<Self>>,
            random: u32,
        ) -> u32 {
            $crate::select::backend::select_for(self, ctx, random)
        }

        fn tagged(self, ctx: &mut $crate::context::PacketCtx<$crate::env::Words<Self>>) -> u32 {
            $crate::select::backend::tagged(self, ctx)
        }

        fn second_chance(
            self,
            ctx: &mut $crate::context::PacketCtx<$crate::env::Words<Self>>,
            id: u32,
        ) -> u32 {
            $crate::select::backend::second_chance(self, ctx, id)
        }
    };
}

/// Methods of [`FlowTable`](crate::env::FlowTable) that are subprograms in the kernel, as direct calls.
macro_rules! calls_flows {
    () => {
        fn find_key(self, key: &proxy_common::flow::FlowKey<$crate::env::Words<Self>>, hash: u64) -> u64 {
            $crate::flow::track::find_key(self, key, hash)
        }

        fn end_flow(self, index: u32, state: u64, removes: bool) -> bool {
            $crate::flow::track::end(self, index, state, removes)
        }

        fn touch_flow(
            self,
            packet: &$crate::context::Packet<$crate::env::Words<Self>>,
            index: u32,
            state: u64,
            direction: u32,
        ) {
            $crate::flow::track::touch(self, packet, index, state, direction);
        }

        fn prefetch(self, hash: u64, reply_hash: u64) {
            $crate::flow::prefetch(self, hash, reply_hash);
        }

        fn unlink(self, index: u32) {
            $crate::flow::index::unlink(self, index);
        }

        fn find_in(
            self,
            bucket: u32,
            tag: u32,
            key: &proxy_common::flow::FlowKey<$crate::env::Words<Self>>,
        ) -> u64 {
            $crate::flow::index::find_in(self, bucket, tag, key)
        }

        fn add_key(self, flow: u32, direction: u32, hash: u64) -> u32 {
            $crate::flow::index::add(self, flow, direction, hash)
        }

        fn take_slot_in(self, bucket: u32, pending: u32, stale: bool) -> u32 {
            $crate::flow::index::take_slot_in(self, bucket, pending, stale)
        }

        fn conflicting_entry(self, flow: u32, direction: u32, own: u32, bucket: u32) -> u32 {
            $crate::flow::index::conflicting_entry(self, flow, direction, own, bucket)
        }

        fn move_window(self, skip: u32, far: bool) -> u64 {
            $crate::flow::evict::move_window(self, skip, far)
        }

        fn scan(self, start: u32, room: u32, now: u32) -> u64 {
            $crate::flow::evict::scan(self, start, room, now)
        }

        fn claim(self, now: u32) -> u32 {
            $crate::flow::evict::claim(self, now)
        }

        fn try_ports(self, index: u32, tries: u32, snat: u32) -> u32 {
            $crate::flow::open::try_ports(self, index, tries, snat)
        }

        fn try_port(self, index: u32, tries: u32, snat: u32) -> u32 {
            $crate::flow::open::try_port(self, index, tries, snat)
        }
    };
}

pub(crate) use {calls_flows, calls_health, calls_selection};
