//! The rules for sequence numbers, stated a second time and compared for every combination of flags, known numbers and distances.

use super::*;

/// Numbers that were noted of the client and of the backend.
const NOTED: [u16; 2] = [100, 65_500];
/// Distances from a noted number, on both sides of the bounds of the window.
const DISTANCES: [i32; 9] = [-20_000, -257, -256, -1, 0, 1, 256, 257, 20_000];
/// A bit that no rule here uses.
const OTHER: u32 = STATE_SNAT | STATE_USED;
/// A flag that no rule here uses (PSH).
const PUSH: u16 = 1 << 3;

/// What is known of a flow before a segment arrives.
#[derive(Clone, Copy)]
struct Known {
    own: Option<u16>,
    other: Option<u16>,
}

fn distance(number: u16, noted: u16) -> i32 {
    // The numbers wrap around: the shorter way counts.
    (i32::from(number) - i32::from(noted) + 0x8000).rem_euclid(0x1_0000) - 0x8000
}

fn is_close(number: u16, noted: u16) -> bool {
    distance(number, noted).abs() <= 256
}

fn has(flags: u16, flag: u16) -> bool {
    flags / flag % 2 == 1
}

fn known(bits: u32, direction: u8) -> Known {
    let client = (bits & SEQ_CLIENT == SEQ_CLIENT).then_some(NOTED[0]);
    let backend = (bits & SEQ_BACKEND == SEQ_BACKEND).then_some(NOTED[1]);
    let (own, other) = if direction == DIRECTION_FORWARD { (client, backend) } else { (backend, client) };
    Known { own, other }
}

/// The bits after a TCP segment, and whether the segment is out of the window.
fn expected_change(bits: u32, segment: Segment) -> (u32, bool) {
    let Segment { direction, tcp_flags, seq, ack } = segment;
    let is_clients = direction == DIRECTION_FORWARD;
    let Known { own, other } = known(bits, direction);
    let is_in_window = match (own, other) {
        (Some(own), _) => is_close(seq, own),
        (None, Some(other)) if has(tcp_flags, tcp::ACK) => is_close(ack, other),
        _ => true,
    };
    let seen_reply = if is_clients { 0 } else { SEEN_REPLY };
    if (has(tcp_flags, tcp::RST) || has(tcp_flags, tcp::FIN)) && !is_in_window {
        return (bits | seen_reply, true);
    }
    let (fin, rst) = if is_clients { (FIN_CLIENT, RST_CLIENT) } else { (FIN_BACKEND, RST_BACKEND) };
    if has(tcp_flags, tcp::RST) {
        return (bits | seen_reply | rst, false);
    }
    let fin = if has(tcp_flags, tcp::FIN) { fin } else { 0 };
    let is_acknowledgement = is_clients && has(tcp_flags, tcp::ACK) && !has(tcp_flags, tcp::SYN);
    let fits = other.is_none_or(|backend| (0..=256).contains(&distance(ack, backend)));
    let assured = if is_acknowledgement && bits & SEEN_REPLY == SEEN_REPLY && fits { ASSURED } else { 0 };
    ((bits - (bits & rst)) | seen_reply | fin | assured, false)
}

/// The numbers and the bits after a segment that is in the window.
fn expected_numbers(bits: u32, segment: Segment) -> ([u16; 2], u32) {
    let Segment { direction, tcp_flags, seq, ack } = segment;
    let is_clients = direction == DIRECTION_FORWARD;
    let Known { own, other } = known(bits, direction);
    let (has_syn, has_ack) = (has(tcp_flags, tcp::SYN), has(tcp_flags, tcp::ACK));
    if has_syn && has_ack && !is_clients {
        return ([ack, seq], bits | SEQ_CLIENT | SEQ_BACKEND);
    }
    let moves = if has_syn {
        bits & ASSURED != ASSURED
    } else {
        let by_ack = has_ack && other.is_some_and(|other| is_close(ack, other));
        own.is_none_or(|own| is_close(seq, own)) || by_ack
    };
    match (moves, is_clients) {
        (false, _) => (NOTED, bits),
        (true, true) => ([seq, NOTED[1]], bits | SEQ_CLIENT),
        (true, false) => ([NOTED[0], seq], bits | SEQ_BACKEND),
    }
}

/// Every union of some of these bits.
fn subsets(of: &[u32]) -> impl Iterator<Item = u32> {
    (0..1u32 << of.len()).map(move |set| {
        of.iter().enumerate().filter(|(at, _)| set >> at & 1 == 1).fold(0, |all, (_, one)| all | one)
    })
}

fn at(noted: u16, distance: i32) -> u16 {
    (i32::from(noted) + distance).rem_euclid(0x1_0000) as u16
}

#[test]
fn each_combination_of_flags_and_numbers_follows_the_rules() {
    let states = [SEQ_CLIENT, SEQ_BACKEND, SEEN_REPLY, ASSURED, RST_CLIENT | RST_BACKEND, OTHER];
    let flags = [tcp::FIN, tcp::SYN, tcp::RST, tcp::ACK, PUSH].map(u32::from);
    for bits in subsets(&states) {
        for tcp_flags in subsets(&flags).map(|flags| flags as u16) {
            for direction in [DIRECTION_FORWARD, DIRECTION_REPLY] {
                let forward = direction == DIRECTION_FORWARD;
                let [own, other] = if forward { NOTED } else { [NOTED[1], NOTED[0]] };
                for (of_seq, of_ack) in DISTANCES.iter().flat_map(|a| DISTANCES.map(|b| (*a, b))) {
                    let segment =
                        Segment { direction, tcp_flags, seq: at(own, of_seq), ack: at(other, of_ack) };
                    let change = next(PROTO_TCP, bits, segment, NOTED, 0, &config());
                    assert_eq!(
                        (change.bits, change.out_of_window),
                        expected_change(bits, segment),
                        "{bits:#x} {segment:?}"
                    );
                    assert_eq!(
                        next_seq(bits, segment, NOTED),
                        expected_numbers(bits, segment),
                        "{bits:#x} {segment:?}"
                    );
                }
            }
        }
    }
}
