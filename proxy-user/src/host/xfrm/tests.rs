use super::*;

fn policy(family: i32, addresses: [[u8; 16]; 2], lengths: [u8; 2], direction: u8) -> Raw {
    let mut body = vec![0; POLICY];
    body[SOURCE..SOURCE + 16].copy_from_slice(&addresses[0]);
    body[..16].copy_from_slice(&addresses[1]);
    body[FAMILY..FAMILY + 2].copy_from_slice(&(family.cast_unsigned() as u16).to_ne_bytes());
    [body[SOURCE_LENGTH], body[DESTINATION_LENGTH]] = lengths;
    body[DIRECTION] = direction;
    Raw { kind: NEW_POLICY, body }
}

fn v4(address: [u8; 4]) -> [u8; 16] {
    let mut octets = [0; 16];
    octets[..4].copy_from_slice(&address);
    octets
}

#[test]
fn a_policy_for_outgoing_packets_is_read_as_ranges() {
    let read = |message| read(&message).map(|IpsecPolicy { src, dst }| format!("{src} {dst}"));
    let pair = [v4([172, 30, 0, 11]), v4([10, 244, 2, 7])];
    assert_eq!(
        read(policy(libc::AF_INET, pair, [32, 24], OUT)).as_deref(),
        Some("172.30.0.11/32 10.244.2.0/24")
    );
    let six = [[0xfd; 16], [0; 16]];
    let expected = "fd00::/8 ::/0";
    assert_eq!(read(policy(libc::AF_INET6, six, [8, 0], OUT)).as_deref(), Some(expected));
    for direction in [0, 2, 3] {
        assert_eq!(read(policy(libc::AF_INET, pair, [32, 24], direction)), None, "in, fwd, per socket");
    }
    let mut short = policy(libc::AF_INET, pair, [32, 24], OUT);
    short.body.truncate(POLICY - 1);
    assert_eq!(read(short), None);
}

#[test]
fn a_policy_of_an_xfrm_device_is_left_to_the_device() {
    for (id, is_read) in [(0u32, true), (7, false)] {
        let mut message = policy(libc::AF_INET, [[0; 16]; 2], [0, 0], OUT);
        message.body.extend(nested(&[(IF_ID, &id.to_ne_bytes())]));
        assert_eq!(read(&message).is_some(), is_read, "{id}");
    }
}
