//! TCP connections that netfilter translates: those that kube-proxy has started.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use super::kube_proxy_rules::list;
use super::message::{ANY_FAMILY, CONNTRACK, Message, TCP, find, find_below};

/// `IPCTNL_MSG_CT_GET`.
const GET: u16 = 1;
/// `CTA_TUPLE_ORIG`, with the addresses (`CTA_TUPLE_IP`) and ports (`CTA_TUPLE_PROTO`) in it.
pub(super) const ORIGINAL: u16 = 1;
pub(super) const ADDRESSES: u16 = 1;
pub(super) const PROTOCOL: u16 = 2;
/// `CTA_IP_V4_DST`, `CTA_IP_V6_DST`, `CTA_PROTO_NUM`, `CTA_PROTO_DST_PORT`.
pub(super) const V4_TO: u16 = 2;
pub(super) const V6_TO: u16 = 4;
pub(super) const NUMBER: u16 = 1;
pub(super) const PORT_TO: u16 = 3;
/// `CTA_STATUS`, and its bits `IPS_SEEN_REPLY`, `IPS_ASSURED`, `IPS_CONFIRMED`, `IPS_DST_NAT`.
pub(super) const STATUS: u16 = 3;
pub(super) const SEEN_REPLY: u32 = 1 << 1;
pub(super) const IS_ASSURED: u32 = 1 << 2;
pub(super) const IS_CONFIRMED: u32 = 1 << 3;
const IS_DNAT: u32 = 1 << 5;
/// `CTA_PROTOINFO`, `CTA_PROTOINFO_TCP`, `CTA_PROTOINFO_TCP_STATE`.
pub(super) const STATE: [u16; 3] = [4, 1, 1];
/// From `TCP_CONNTRACK_SYN_SENT` to `TCP_CONNTRACK_CLOSE_WAIT`: the connection has not ended.
const ALIVE: std::ops::RangeInclusive<u8> = 1..=5;

/// Returns the original destination of each TCP connection that is alive and whose destination netfilter translates.
pub fn translated() -> io::Result<Vec<SocketAddr>> {
    let answers = list(Message::new(CONNTRACK, GET, ANY_FAMILY))?;
    Ok(answers.iter().filter_map(|message| original_destination(&message.body)).collect())
}

fn original_destination(entry: &[u8]) -> Option<SocketAddr> {
    let status = u32::from_be_bytes(*find(entry, STATUS)?.first_chunk()?);
    let state = *find_below(entry, &STATE)?.first()?;
    let tuple = find(entry, ORIGINAL)?;
    let (addresses, protocol) = (find(tuple, ADDRESSES)?, find(tuple, PROTOCOL)?);
    if status & IS_DNAT == 0 || !ALIVE.contains(&state) || find(protocol, NUMBER)?.first() != Some(&TCP) {
        return None;
    }
    let port = u16::from_be_bytes(*find(protocol, PORT_TO)?.first_chunk()?);
    let address: IpAddr = match (find(addresses, V4_TO), find(addresses, V6_TO)) {
        (Some(bytes), _) => Ipv4Addr::from(*bytes.first_chunk::<4>()?).into(),
        (_, Some(bytes)) => Ipv6Addr::from(*bytes.first_chunk::<16>()?).into(),
        _ => return None,
    };
    Some(SocketAddr::new(address, port))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::netfilter::message::nested;

    fn entry(status: u32, state: u8, protocol: u8) -> Vec<u8> {
        let addresses = nested(&[(1, &[10, 0, 0, 1]), (V4_TO, &[10, 96, 0, 1])]);
        let ports = nested(&[(NUMBER, &[protocol]), (PORT_TO, &443u16.to_be_bytes())]);
        let tuple = nested(&[(ADDRESSES, &addresses), (PROTOCOL, &ports)]);
        let info = nested(&[(1, &nested(&[(1, &[state])]))]);
        nested(&[(ORIGINAL, &tuple), (STATUS, &status.to_be_bytes()), (4, &info)])
    }

    #[test]
    fn only_translated_tcp_that_has_not_ended_has_an_original_destination() {
        assert_eq!(original_destination(&entry(IS_DNAT | 1, 3, TCP)), Some("10.96.0.1:443".parse().unwrap()));
        assert_eq!(original_destination(&entry(1, 3, TCP)), None, "not translated");
        assert_eq!(original_destination(&entry(IS_DNAT, 7, TCP)), None, "TIME_WAIT");
        assert_eq!(original_destination(&entry(IS_DNAT, 3, 17)), None, "UDP");
        assert_eq!(original_destination(&[]), None);
    }
}
