use super::*;
use crate::flow::{
    DIRECTION_REPLY, STATE_SNAT, STATE_USED, WATCH_INSIDE, WATCH_LAST, WATCH_OUTSIDE, with_bits,
};
use crate::{PROTO_SCTP, PROTO_UDP};

mod window;

const HZ: u32 = 1000;

fn config() -> NodeConfig {
    NodeConfig::new(HZ, 16, 16, 1)
}

/// A flow whose state changes with segments, as in the programs.
#[derive(Clone, Copy)]
struct Tracked {
    proto: u8,
    bits: u32,
    seq: [u16; 2],
}

impl Tracked {
    fn new(proto: u8) -> Self {
        Self { proto, bits: STATE_USED, seq: [0; 2] }
    }

    /// Applies a segment of one side with sequence number `seq` and acknowledgement number `ack`; returns whether it was
    /// out of the window.
    fn sees(&mut self, direction: u8, tcp_flags: u16, seq: u16, ack: u16) -> bool {
        self.sees_after(0, direction, tcp_flags, seq, ack)
    }

    /// As `sees`, after a silence of this many jiffies.
    fn sees_after(&mut self, silent: u32, direction: u8, tcp_flags: u16, seq: u16, ack: u16) -> bool {
        let segment = Segment { direction, tcp_flags, seq, ack };
        let change = next(self.proto, self.bits, segment, self.seq, 0, &config());
        let is_syn = direction == DIRECTION_FORWARD && tcp_flags & (tcp::SYN | tcp::ACK) == tcp::SYN;
        self.bits = with_syn(change.bits, is_syn, silent, HZ);
        if self.proto == PROTO_TCP && !change.out_of_window {
            (self.seq, self.bits) = next_seq(self.bits, segment, self.seq);
        }
        change.out_of_window
    }

    fn established() -> Self {
        let mut flow = Self::new(PROTO_TCP);
        flow.sees(DIRECTION_FORWARD, tcp::SYN, 100, 0);
        flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 9000, 100);
        flow.sees(DIRECTION_FORWARD, tcp::ACK, 100, 9000);
        flow
    }

    fn timeout_secs(&self) -> u32 {
        timeout(self.proto, self.bits, &config()) / HZ
    }
}

#[test]
fn a_handshake_goes_from_unreplied_to_assured() {
    let mut flow = Tracked::new(PROTO_TCP);
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 100, 0);
    assert_eq!((flow.bits & (SEEN_REPLY | ASSURED), flow.timeout_secs()), (0, 60));
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 9000, 100);
    assert_eq!((flow.bits & (SEEN_REPLY | ASSURED), flow.timeout_secs()), (SEEN_REPLY, 60));
    flow.sees(DIRECTION_FORWARD, tcp::ACK, 100, 9000);
    assert_eq!((flow.bits & (SEEN_REPLY | ASSURED), flow.timeout_secs()), (SEEN_REPLY | ASSURED, 86_400));
}

#[test]
fn a_client_that_does_not_see_the_answer_is_not_assured() {
    let mut flow = Tracked::new(PROTO_TCP);
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 100, 0);
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 9000, 100);
    for guess in [0, 8_999, 9_257, 40_000] {
        flow.sees(DIRECTION_FORWARD, tcp::ACK, 100, guess);
        assert_eq!(flow.bits & ASSURED, 0, "{guess}");
    }
    // A retransmitted SYN does not acknowledge the backend's answer.
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 100, 9000);
    flow.sees(DIRECTION_FORWARD, tcp::SYN | tcp::ACK, 100, 9000);
    assert_eq!(flow.bits & ASSURED, 0);
}

#[test]
fn fin_closes_only_the_direction_of_its_sender() {
    let mut flow = Tracked::established();
    flow.sees(DIRECTION_FORWARD, tcp::FIN | tcp::ACK, 100, 9000);
    assert!(is_half_closed(flow.bits) && !is_closed(flow.bits));
    assert_eq!(flow.timeout_secs(), 3600);
    flow.sees(DIRECTION_REPLY, tcp::FIN | tcp::ACK, 9000, 100);
    assert!(is_closed(flow.bits));
    assert_eq!(flow.timeout_secs(), 120);
}

#[test]
fn a_reset_out_of_the_window_changes_nothing() {
    for (direction, seq) in [(DIRECTION_FORWARD, 100), (DIRECTION_REPLY, 9000)] {
        for flags in [tcp::RST, tcp::RST | tcp::ACK, tcp::FIN | tcp::ACK] {
            for off in [257, 1000, 0x8000, 0u16.wrapping_sub(257)] {
                let mut flow = Tracked::established();
                let before = flow.bits;
                assert!(
                    flow.sees(direction, flags, off.wrapping_add(seq), 100),
                    "{direction} {flags:#x} {off}"
                );
                assert_eq!(flow.bits, before);
            }
        }
    }
}

#[test]
fn blind_segment_in_established_state_leaves_window_and_state_unchanged() {
    for (direction, near) in [(DIRECTION_FORWARD, 100), (DIRECTION_REPLY, 9000)] {
        for flags in [tcp::ACK, tcp::SYN, 0] {
            let mut flow = Tracked::established();
            let before = flow.bits;
            flow.sees(direction, flags, 30_000, 20_000);
            assert!(flow.sees(direction, tcp::RST, 30_000, 0), "{direction} {flags:#x}");
            assert_eq!(flow.bits & RSTS, before & RSTS);
            assert!(!flow.sees(direction, tcp::RST, near, 0));
        }
    }
}

#[test]
fn a_window_moves_with_its_connection() {
    let mut flow = Tracked::established();
    // 10 GB of the backend, and the client's acknowledgements.
    for step in (0..160_000u32).step_by(200) {
        assert!(!flow.sees(DIRECTION_REPLY, tcp::ACK, 9000u16.wrapping_add(step as u16), 100));
        assert!(!flow.sees(DIRECTION_FORWARD, tcp::ACK, 100, 9000u16.wrapping_add(step as u16)));
    }
    assert!(!flow.sees(DIRECTION_REPLY, tcp::FIN | tcp::ACK, 9000u16.wrapping_add(160_000u32 as u16), 100));
    assert!(is_half_closed(flow.bits));
}

#[test]
fn new_connection_on_an_existing_flow_has_its_own_window() {
    let mut flow = Tracked::established();
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 40_000, 0);
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 55_000, 40_000);
    assert!(!flow.sees(DIRECTION_FORWARD, tcp::FIN | tcp::ACK, 40_000, 55_000));
    assert!(!flow.sees(DIRECTION_REPLY, tcp::FIN | tcp::ACK, 55_000, 40_000));
    assert!(is_closed(flow.bits));
}

/// The backend has closed its side and the client is gone; its port is used again. Or the client has closed.
#[test]
fn new_connection_on_reused_ports_has_no_fin_of_the_old_one() {
    for (direction, seq, ack) in [(DIRECTION_REPLY, 9000, 100), (DIRECTION_FORWARD, 100, 9000)] {
        for silent in [0, HZ, 3000 * HZ] {
            let mut flow = Tracked::established();
            flow.sees(direction, tcp::FIN | tcp::ACK, seq, ack);
            assert_eq!(flow.timeout_secs(), 3600);
            flow.sees_after(silent, DIRECTION_FORWARD, tcp::SYN, 40_000, 0);
            flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 55_000, 40_000);
            assert_eq!((flow.bits & (FINS | RSTS), flow.timeout_secs()), (0, 86_400), "{direction} {silent}");
            flow.sees(DIRECTION_FORWARD, tcp::ACK, 40_000, 55_000);
            flow.sees(DIRECTION_FORWARD, tcp::FIN | tcp::ACK, 40_000, 55_000);
            assert!(!is_closed(flow.bits), "the backend has not closed the second connection");
            flow.sees(DIRECTION_REPLY, tcp::FIN | tcp::ACK, 55_000, 40_000);
            assert!(is_closed(flow.bits));
        }
    }
}

#[test]
fn a_repeated_syn_ack_does_not_take_a_fin_back() {
    let mut flow = Tracked::established();
    flow.sees(DIRECTION_FORWARD, tcp::FIN | tcp::ACK, 100, 9000);
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 9000, 100);
    assert_eq!(flow.bits & FINS, FIN_CLIENT);
    // A backend that still has the old connection answers a SYN with an ACK (RFC 5961, 4).
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 40_000, 0);
    flow.sees(DIRECTION_REPLY, tcp::ACK, 9000, 100);
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 9000, 100);
    assert_eq!(flow.bits & FINS, FIN_CLIENT);
}

#[test]
fn a_segment_of_another_connection_has_other_numbers() {
    let flow = Tracked::established();
    let is_own = |bits, direction, tcp_flags, seq, ack| {
        has_numbers_of(bits, Segment { direction, tcp_flags, seq, ack }, flow.seq)
    };
    for (direction, own, other) in [(DIRECTION_FORWARD, 100, 9000), (DIRECTION_REPLY, 9000, 100)] {
        for (seq, ack) in [(own, other), (own + 256, other + 256), (own - 99, other - 99)] {
            assert!(is_own(flow.bits, direction, tcp::ACK, seq, ack), "{direction} {seq} {ack}");
        }
        for (seq, ack) in [(own + 257, other), (own, other + 257), (own + 40_000, other + 40_000)] {
            assert!(!is_own(flow.bits, direction, tcp::ACK, seq, ack), "{direction} {seq} {ack}");
        }
        assert!(is_own(flow.bits, direction, tcp::RST, own, 0), "a RST without ACK acknowledges nothing");
        assert!(!is_own(flow.bits, direction, tcp::RST, own + 257, other));
        let unknown = flow.bits & !(SEQ_CLIENT | SEQ_BACKEND);
        assert!(is_own(unknown, direction, tcp::ACK, 40_000, 40_000));
    }
}

#[test]
fn the_next_segment_of_the_side_that_reset_takes_the_reset_back() {
    for (direction, other, seq) in
        [(DIRECTION_FORWARD, DIRECTION_REPLY, 100), (DIRECTION_REPLY, DIRECTION_FORWARD, 9000)]
    {
        let mut flow = Tracked::established();
        assert!(!flow.sees(direction, tcp::RST, seq, 0));
        assert!(is_closed(flow.bits));
        assert_eq!(flow.timeout_secs(), 120);
        // Segments that the other side still sends do not undo the reset.
        flow.sees(other, tcp::ACK, if other == DIRECTION_FORWARD { 100 } else { 9000 }, 0);
        assert!(is_closed(flow.bits));
        flow.sees(direction, tcp::ACK, seq, 0);
        assert!(!is_closed(flow.bits));
        assert_eq!(flow.timeout_secs(), 86_400);
    }
}

#[test]
fn reset_from_a_silent_backend_needs_a_valid_acknowledgement() {
    let mut flow = Tracked::new(PROTO_TCP);
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 100, 0);
    let mut forged = flow;
    assert!(forged.sees(DIRECTION_REPLY, tcp::RST | tcp::ACK, 0, 5000));
    assert!(!is_closed(forged.bits));
    assert!(!flow.sees(DIRECTION_REPLY, tcp::RST | tcp::ACK, 0, 100));
    assert!(is_closed(flow.bits));
}

#[test]
fn sctp_is_assured_by_the_clients_next_chunk_and_has_no_window() {
    let mut flow = Tracked::new(PROTO_SCTP);
    flow.sees(DIRECTION_FORWARD, tcp::SYN, 0, 0);
    flow.sees(DIRECTION_REPLY, tcp::SYN | tcp::ACK, 0, 0);
    flow.sees(DIRECTION_FORWARD, tcp::ACK, 0, 0);
    assert_eq!(flow.timeout_secs(), 86_400);
    flow.sees(DIRECTION_REPLY, tcp::RST, 0, 0);
    assert!(is_closed(flow.bits));
}

#[test]
fn udp_is_a_stream_after_two_seconds() {
    let at = |bits, direction, age| {
        next(PROTO_UDP, bits, Segment { direction, tcp_flags: 0, seq: 0, ack: 0 }, [0; 2], age, &config())
            .bits
    };
    let bits = at(STATE_USED, DIRECTION_FORWARD, 5000);
    assert_eq!(bits, STATE_USED);
    let bits = at(bits, DIRECTION_REPLY, 1999);
    assert_eq!((bits, timeout(PROTO_UDP, bits, &config())), (STATE_USED | SEEN_REPLY, 30 * HZ));
    let bits = at(bits, DIRECTION_FORWARD, 2001);
    assert_eq!((bits, timeout(PROTO_UDP, bits, &config())), (STATE_USED | SEEN_REPLY | ASSURED, 120 * HZ));
    // Another CPU saw the flow before it began by this CPU's clock.
    assert_eq!(at(STATE_USED | SEEN_REPLY, DIRECTION_FORWARD, u32::MAX), STATE_USED | SEEN_REPLY);
}

fn priority(proto: u8, bits: u32, silent: u32) -> u32 {
    eviction_priority(
        proto,
        with_bits(9 << 32, bits),
        50_000,
        silent.wrapping_add(50_000),
        &config(),
        |number| number,
    )
}

#[test]
fn only_flows_that_are_not_assured_are_evicted() {
    let tcp = |bits, silent| priority(PROTO_TCP, STATE_USED | bits, silent);
    assert_eq!(priority(PROTO_TCP, 0, 0), 0);
    assert_eq!(tcp(0, 60_001), 1);
    assert_eq!(tcp(SEEN_REPLY, 60_001), 1);
    assert_eq!(tcp(SEEN_REPLY | ASSURED | RST_CLIENT, 0), 2);
    assert_eq!(tcp(SEEN_REPLY | ASSURED | FIN_CLIENT | FIN_BACKEND, 0), 2);
    assert_eq!(tcp(SEEN_REPLY, 1_001), 3);
    assert_eq!(tcp(0, 1_001), 4);
    assert_eq!(tcp(SEEN_REPLY, 1_000), 5);
    assert_eq!(tcp(0, 1_000), 5);
    assert_eq!(tcp(SEEN_REPLY | ASSURED, 80_000_000), KEEP);
    assert_eq!(tcp(SEEN_REPLY | ASSURED | STATE_SNAT, 0u32.wrapping_sub(1)), KEEP);
    assert_eq!(tcp(STATE_CLAIMED, 80_000_000), KEEP);
    assert_eq!(priority(PROTO_UDP, STATE_USED | SEEN_REPLY | ASSURED, 1_001), KEEP);
    assert_eq!(priority(PROTO_UDP, STATE_USED | SEEN_REPLY, 1_001), 3);
}

#[test]
fn a_half_closed_flow_may_be_evicted_after_a_minute() {
    let minute = 60 * HZ;
    for bits in [FIN_CLIENT, FIN_BACKEND].map(|fin| STATE_USED | SEEN_REPLY | ASSURED | fin) {
        for (silent, abandoned) in
            [(minute + 1, true), (minute, false), (0, false), (0u32.wrapping_sub(1), false)]
        {
            assert_eq!(is_abandoned(bits, silent, HZ), abandoned, "{silent}");
            let expected = if abandoned { KEEP - 1 } else { KEEP };
            assert_eq!(priority(PROTO_TCP, bits, silent), expected, "{silent}");
        }
        let unassured = bits & !ASSURED;
        assert_eq!(priority(PROTO_TCP, unassured, 2 * HZ), 3, "the flow of a flood is evicted before");
    }
    assert!(!is_abandoned(ASSURED, 80_000_000, HZ), "an established flow is never evicted");
}

#[test]
fn ports_are_kept_for_a_minute_after_both_ends_have_closed() {
    let last_seen = u32::MAX - 5;
    let at = |bits, now: u32| keeps_ports(PROTO_TCP, STATE_USED | bits, last_seen, now, HZ);
    let closed = FIN_CLIENT | FIN_BACKEND;
    // A timer of 60 s that is late by 5.12 s, as it may be at 100 Hz.
    assert!(at(closed, last_seen) && at(closed, 65_120) && at(closed, last_seen - 1));
    assert!(!at(closed, 67_000));
    for bits in [closed | RST_CLIENT, FIN_CLIENT, FIN_BACKEND, SEEN_REPLY, RST_CLIENT, ASSURED | RST_BACKEND]
    {
        assert!(!at(bits, last_seen), "{bits:#x}");
    }
    let reset = ASSURED | RST_CLIENT;
    assert!(at(reset, last_seen) && at(reset | FIN_CLIENT, last_seen) && !at(reset, 67_000), "may be forged");
    assert!(!at(reset | RST_BACKEND, last_seen) && !at(reset | closed, last_seen));
    assert!(!keeps_ports(PROTO_UDP, STATE_USED | closed, last_seen, last_seen, HZ));
}

#[test]
fn a_flow_that_another_cpu_has_just_seen_is_not_expired() {
    for now in [0, 5, 40_000, u32::MAX] {
        let expired = |last_seen| is_expired(PROTO_UDP, STATE_USED, last_seen, now, &config());
        assert!(!expired(now.wrapping_add(1)), "seen after {now}");
        assert!(!expired(now.wrapping_sub(30_000)));
        assert!(expired(now.wrapping_sub(30_001)));
    }
}

#[test]
fn timeout_of_a_dsr_flow_follows_the_clients_segments() {
    use crate::flow::{STATE_DSR, STATE_TUNNEL_SHIFT, STATE_USED};
    let config = NodeConfig::new(100, 16, 16, 1);
    let one = |bits: u32, flags: u16| {
        let segment = Segment { direction: DIRECTION_FORWARD, tcp_flags: flags, seq: 1, ack: 1 };
        next_dsr(next(PROTO_TCP, bits, segment, [1, 1], 0, &config).bits, flags)
    };
    let begun = one(STATE_USED | STATE_DSR | 5 << STATE_TUNNEL_SHIFT, tcp::SYN);
    assert_eq!(timeout(PROTO_TCP, begun, &config), config.tcp_syn_sent);
    let known = (0..3).fold(begun, |bits, _| one(bits, tcp::ACK));
    assert_eq!(known & (SEEN_REPLY | ASSURED), SEEN_REPLY, "a forged ACK looks the same");
    assert_eq!(timeout(PROTO_TCP, known, &config), config.tcp_established);
    let priority = |bits: u32, silent: u32| {
        eviction_priority(PROTO_TCP, bits.into(), 0, silent, &config, |number| number)
    };
    assert_eq!(
        [priority(begun, 200), priority(known, 200), priority(known, 0)],
        [4, 5, 5],
        "after half-open ones"
    );
    let closed = one(known, tcp::FIN | tcp::ACK);
    assert!(is_closed(closed), "the backend's FIN goes another way");
    assert_eq!(timeout(PROTO_TCP, closed, &config), config.tcp_time_wait);
    assert_eq!(one(known, tcp::RST) & RST_CLIENT, RST_CLIENT);
}

#[test]
fn only_a_syn_or_a_bare_acknowledgement_begins_a_connection() {
    let [fin, syn, rst, ack] = [tcp::FIN, tcp::SYN, tcp::RST, tcp::ACK];
    // PSH and URG do not matter.
    for flags in [syn, ack, ack | 8, syn | 32] {
        assert!(may_begin(flags), "{flags:#x}");
    }
    for flags in [0, fin, rst, syn | ack, fin | ack, rst | ack, syn | rst, syn | fin, 8] {
        assert!(!may_begin(flags), "{flags:#x}");
    }
}

#[test]
fn the_second_unanswered_syn_ends_an_assured_flow() {
    let silent = HZ / SYN_ANSWERS_PER_SEC;
    let known = SEEN_REPLY | ASSURED;
    assert_eq!(with_syn(known, true, silent + 1, HZ), known | SYN_UNANSWERED);
    assert_eq!(with_syn(known, true, silent, HZ), known, "the flow was not silent before");
    assert_eq!(with_syn(SEEN_REPLY, true, silent + 1, HZ), SEEN_REPLY, "it is not assured");
    assert_eq!(with_syn(known | SYN_UNANSWERED, true, 0, HZ), known | SYN_UNANSWERED);
    assert_eq!(with_syn(known | SYN_UNANSWERED, false, silent + 1, HZ), known, "anything else is an answer");
    assert!(is_syn_unanswered(known | SYN_UNANSWERED, silent + 1, HZ));
    assert!(!is_syn_unanswered(known | SYN_UNANSWERED, silent, HZ));
    assert!(!is_syn_unanswered(known, silent + 1, HZ));
    assert!(!is_syn_unanswered(SYN_UNANSWERED, silent - 1, HZ));
}

#[test]
fn ejection_waits_for_the_first_answer_to_a_watched_syn() {
    let waits = STATE_SYN | WATCH_INSIDE;
    for watch in [WATCH_INSIDE, WATCH_OUTSIDE, WATCH_LAST] {
        assert!(is_watched(STATE_SYN | watch) && is_watched(STATE_SYN | watch | STATE_USED));
        let hidden = STATE_SYN | watch | SYN_UNANSWERED;
        assert!(is_hidden(hidden) && !is_watched(hidden) && !is_closed(hidden));
        assert!(!is_hidden(hidden | SEEN_REPLY) && !is_hidden(hidden & !SYN_UNANSWERED));
    }
    for bits in [STATE_SYN, WATCH_INSIDE, waits | SEEN_REPLY, waits | RST_BACKEND, 0] {
        assert!(!is_watched(bits), "{bits:#x}");
    }
    assert!(!is_hidden(STATE_SYN | SYN_UNANSWERED), "the flow is not watched");
    let patience = HZ / SYN_ANSWERS_PER_SEC;
    assert!(is_unanswered(waits, patience + 1, 0, HZ));
    assert!(!is_unanswered(waits, patience, 0, HZ) && !is_unanswered(waits, patience - 1, 0, HZ));
    assert!(!is_unanswered(STATE_SYN, patience + 1, 0, HZ));
}

#[test]
fn a_refusal_acknowledges_the_syn() {
    let refusal = tcp::RST | tcp::ACK;
    for (ack, is_refusal) in [(7, true), (8, true), (9, false), (6, false), (0x8007, false)] {
        assert_eq!(refuses_syn(refusal, ack, 7), is_refusal, "{ack}");
    }
    assert!(refuses_syn(refusal, 0, 0xffff), "sequence numbers wrap");
    assert!(refuses_syn(refusal | 5 << 12, 7, 7) && !refuses_syn(refusal | 6 << 12, 7, 7), "without options");
    for flags in [tcp::RST, tcp::ACK, tcp::SYN | tcp::ACK, refusal | tcp::SYN, 0] {
        assert!(!refuses_syn(flags, 7, 7), "{flags:#x}");
    }
}

#[test]
fn a_flow_counts_until_it_is_closed() {
    assert!(is_counted(STATE_COUNTS) && is_counted(STATE_COUNTS | ASSURED | FIN_CLIENT));
    for bits in [0, ASSURED, STATE_COUNTS | RST_CLIENT, STATE_COUNTS | RST_BACKEND] {
        assert!(!is_counted(bits), "{bits:#x}");
    }
    assert!(!is_counted(STATE_COUNTS | FIN_CLIENT | FIN_BACKEND));
    assert!(
        is_half_closed(FIN_CLIENT) && is_half_closed(FIN_BACKEND) && !is_half_closed(ASSURED | RST_CLIENT)
    );
}

#[test]
fn state_of_a_dsr_flow_follows_the_clients_segments() {
    assert_eq!(next_dsr(ASSURED, tcp::ACK), SEEN_REPLY, "never assured");
    for flags in [tcp::SYN, tcp::SYN | tcp::ACK, tcp::RST | tcp::ACK, 0] {
        assert_eq!(next_dsr(0, flags), 0, "{flags:#x}");
    }
    assert_eq!(next_dsr(0, tcp::FIN), 0, "the first FIN is in the bits already, or it was not the client's");
    assert_eq!(next_dsr(FIN_CLIENT, tcp::FIN), FIN_CLIENT | FIN_BACKEND);
    assert_eq!(next_dsr(FIN_CLIENT, tcp::ACK), FIN_CLIENT | SEEN_REPLY);
    assert_eq!(next_dsr(SEEN_REPLY, tcp::FIN), SEEN_REPLY);
}

#[test]
fn an_exchange_of_udp_is_a_stream_after_more_than_two_seconds() {
    let after = |age| {
        let segment = Segment { direction: DIRECTION_FORWARD, tcp_flags: 0, seq: 0, ack: 0 };
        next(PROTO_UDP, SEEN_REPLY, segment, [0; 2], age, &config()).bits & ASSURED != 0
    };
    assert!(!after(2 * HZ) && after(2 * HZ + 1));
    assert!(!after(u32::MAX), "the flow began a moment after the clock was read");
}

#[test]
fn an_entry_expires_by_its_own_bits() {
    let flow = |bits: u32, last_seen| FlowEntry::<[u8; 4]> {
        state: u64::from(STATE_USED | bits),
        proto: PROTO_TCP,
        last_seen,
        ..FlowEntry::default()
    };
    let now = 1_000_000;
    assert!(flow(0, now - 61 * HZ).is_expired(now, &config()));
    assert!(!flow(0, now - 60 * HZ).is_expired(now, &config()));
    assert!(!flow(SEEN_REPLY | ASSURED, now - 61 * HZ).is_expired(now, &config()));
    // Another CPU may have seen the flow up to one second after the clock was read.
    assert!(!flow(0, now + HZ).is_expired(now, &config()));
    assert!(flow(0, now + HZ + 1).is_expired(now, &config()));
}

#[test]
fn a_flow_that_is_not_assured_has_one_timeout_before_the_answer_and_another_after_it() {
    let config = NodeConfig { tcp_syn_sent: 1, tcp_syn_recv: 2, ..config() };
    let of = |bits| timeout(PROTO_TCP, STATE_USED | bits, &config);
    assert_eq!([of(0), of(STATE_SYN), of(SEEN_REPLY), of(SEEN_REPLY | STATE_SYN)], [1, 1, 2, 2]);
}

#[test]
fn a_time_that_is_ahead_has_age_zero_only_within_a_minute() {
    for (then, expected) in [
        (1_000, 0),
        (990, 10),
        (1_001, 0),
        (61_000, 0),
        (61_001, u32::MAX - 60_000),
        (1_001 + (1 << 31), (1 << 31) - 1),
    ] {
        assert_eq!(age(1_000, then, 1_000), expected, "{then}");
    }
}
