//! VLAN tags. The kernel removes them before any program sees the packet, and stores them beside it.

use std::net::{SocketAddrV4, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use proxy_user::maps::view::View;

use super::{Case, WEB, client_ip, vip};
use crate::fixture::{Fixture, SMALL, Wish};
use crate::peer::{Attempt, SocketKind};
use crate::raw;
use proxy_testbed::Family;

const WISH: Wish = Wish { pods: 1, services: &[WEB], flags: SMALL };

pub const CASES: &[Case] = &[Case {
    name: "tagged::vlan_packets_pass_to_their_device_and_priority_tags_are_served",
    wish: WISH,
    run: tags,
}];

/// Returns the Ethernet address of the neighbour on a device, from the ARP table of this thread's namespace.
fn neighbour_mac(device: &str) -> Result<[u8; 6]> {
    let text = std::fs::read_to_string("/proc/thread-self/net/arp")?;
    let line = text.lines().find(|line| line.ends_with(device)).context("no packet was seen yet")?;
    let neighbour_mac = line.split_whitespace().nth(3).context("no address")?;
    let octets: Vec<u8> =
        neighbour_mac.split(':').map(|octet| u8::from_str_radix(octet, 16)).collect::<Result<_, _>>()?;
    octets.try_into().map_err(|octets| anyhow::anyhow!("{octets:?}"))
}

/// Returns a frame with these VLAN tags and a UDP datagram over IPv4. The UDP checksum is missing, since it is optional.
fn datagram(to: [u8; 6], tags: &[u16], from: SocketAddrV4, orig_dst: SocketAddrV4, text: &[u8]) -> Vec<u8> {
    let mut frame = [&to[..], &[2, 0, 0, 0, 0, 1]].concat();
    for tag in tags {
        frame.extend([0x81, 0x00]);
        frame.extend(tag.to_be_bytes());
    }
    frame.extend([0x08, 0x00]);
    let mut ip =
        [&[0x45, 0][..], &(28 + text.len() as u16).to_be_bytes(), &[0, 0, 0x40, 0, 64, 17, 0, 0]].concat();
    ip.extend(from.ip().octets());
    ip.extend(orig_dst.ip().octets());
    let sum: u32 = ip.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
    let check = !((sum & 0xffff) + (sum >> 16)) as u16;
    ip[10..12].copy_from_slice(&check.to_be_bytes());
    frame.extend(ip);
    frame.extend(from.port().to_be_bytes());
    frame.extend(orig_dst.port().to_be_bytes());
    frame.extend((8 + text.len() as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend(text);
    frame
}

/// Sends a frame unchanged by a device of this thread's namespace.
fn send(device: &str, frame: &[u8]) -> Result<()> {
    let index: i32 = std::fs::read_to_string(format!("/proc/thread-self/net/dev_snmp6/{device}"))
        .ok()
        .and_then(|text| text.lines().find_map(|line| line.strip_prefix("ifIndex")?.trim().parse().ok()))
        .context("no such device")?;
    raw::send_frame(&raw::link_socket()?, index, frame)
}

/// Returns the number of flows.
fn flow_count(fixture: &Fixture) -> Result<usize> {
    Ok(View::open(&fixture.bpffs())?.flows()?.len())
}

fn tags(fixture: &Fixture) -> Result<()> {
    let (vip, client) = (vip(Family::V4, WEB, SocketKind::Udp), client_ip(Family::V4));
    let (std::net::SocketAddr::V4(orig_dst), std::net::IpAddr::V4(own)) = (vip, client) else {
        anyhow::bail!("IPv4 only");
    };
    // This exchange makes the neighbour known.
    fixture.client.reach(Attempt::new(SocketKind::Udp, vip))?;
    let before = flow_count(fixture)?;
    // Tags, and whether the Service answers. The upper bits of a tag are a priority.
    let table = [
        (&[][..], true),
        (&[0], true),
        (&[0xe000], true),
        (&[7], false),
        (&[0x6fff], false),
        (&[0, 7], false),
        (&[0, 0], false),
    ];
    let mut answered = 0;
    for (row, (tags, answers)) in table.into_iter().enumerate() {
        let text = format!("row {row}");
        let heard = fixture.client_space.inside(|| {
            let socket = UdpSocket::bind((own, 0))?;
            socket.set_read_timeout(Some(Duration::from_secs(if answers { 30 } else { 1 })))?;
            let from = SocketAddrV4::new(own, socket.local_addr()?.port());
            send("eth0", &datagram(neighbour_mac("eth0")?, tags, from, orig_dst, text.as_bytes()))?;
            let mut answer = [0; 256];
            Ok(socket.recv_from(&mut answer).ok().map(|(_, from)| from))
        })?;
        ensure!(heard == answers.then_some(vip), "{tags:x?}: an answer from {heard:?}");
        answered += usize::from(answers);
        let flows = flow_count(fixture)? - before;
        ensure!(flows == answered, "{tags:x?}: {flows} flows, not {answered}");
    }
    Ok(())
}
