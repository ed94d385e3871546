//! Packet programs on kernels without TCX (before 6.6): filters of the clsact qdisc.
//!
//! Such a filter belongs to its device, not to a file descriptor: it needs no pin, and stays when the agent ends. Ballast's
//! filter has one of two handles, by which a later agent finds it and replaces it in place.
//!
//! Filters run by priority, the lowest number first. Of one priority, the kernel runs the BPF filter first that was added
//! last, and lists them in this order. A filter that returns `TC_ACT_OK` ends the list: those behind it see no packet.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption,
};

use super::hooks::Direction;
use crate::host::netlink::Netlink;

/// The handles of Ballast's filter among the filters of its priority: a filter that has to move in front of another one is
/// added with the other handle before the old one is removed.
const HANDLES: [u32; 2] = [0x0ba1_1a57, 0x0ba1_1a58];
/// `ETH_P_ALL`: packets of every protocol.
const ALL_PROTOCOLS: u16 = 3;
/// The protocols whose packets Ballast translates.
const PROTOCOLS: [u16; 3] = [ALL_PROTOCOLS, 0x0800, 0x86dd];
const CLSACT: &str = "clsact";

/// A filter on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub priority: u16,
    pub handle: u32,
    /// `ETH_P_...`.
    pub protocol: u16,
    /// Its name if it is a BPF filter.
    pub name: Option<String>,
    /// Id of its program.
    pub program: Option<u32>,
}

impl Filter {
    /// Whether the filter is Ballast's, at whatever priority an earlier agent put it.
    pub(super) fn is_ours(&self, direction: Direction) -> bool {
        HANDLES.contains(&self.handle) && self.name.as_deref() == Some(direction.program())
    }

    /// Whether the filter runs a BPF program for packets that Ballast translates.
    fn meets_packets(&self) -> bool {
        self.program.is_some() && PROTOCOLS.contains(&self.protocol)
    }

    fn place(&self) -> (u16, u32) {
        (self.priority, self.handle)
    }
}

/// Returns the BPF filters of others that run before a filter of Ballast with this priority, of those in the kernel's order.
/// Without a filter of Ballast, those of the same priority run behind the one that will be added.
pub(super) fn before(filters: &[Filter], direction: Direction, priority: u16) -> Vec<&Filter> {
    let is_own = |filter: &Filter| filter.priority == priority && filter.is_ours(direction);
    let own = filters.iter().position(is_own).unwrap_or(0);
    let is_before = |(at, filter): &(usize, &Filter)| {
        filter.priority < priority || filter.priority == priority && *at < own
    };
    let others = filters.iter().enumerate().filter(|(_, filter)| !filter.is_ours(direction));
    others.filter(is_before).map(|(_, filter)| filter).filter(|filter| filter.meets_packets()).collect()
}

/// Whether Ballast's filter is the only one of Ballast, has this priority, and runs first of the filters that have it.
pub(super) fn is_in_place(filters: &[Filter], direction: Direction, priority: u16) -> bool {
    let mut ours = filters.iter().filter(|filter| filter.is_ours(direction));
    let is_own = ours.next().is_some_and(|filter| filter.priority == priority) && ours.next().is_none();
    is_own && before(filters, direction, priority).iter().all(|filter| filter.priority < priority)
}

/// Returns the handle for Ballast's filter: its present one if it can stay in its place, otherwise the other one.
pub(super) fn handle(filters: &[Filter], direction: Direction, priority: u16) -> u32 {
    let own = filters.iter().find(|filter| filter.priority == priority && filter.is_ours(direction));
    let is_first = before(filters, direction, priority).iter().all(|filter| filter.priority < priority);
    let [one, other] = HANDLES;
    match own.map(|filter| filter.handle) {
        Some(handle) if is_first => handle,
        Some(handle) if handle == one => other,
        _ => one,
    }
}

fn parent(direction: Direction) -> TcHandle {
    let minor = match direction {
        Direction::Ingress => TcHandle::MIN_INGRESS,
        Direction::Egress => TcHandle::MIN_EGRESS,
    };
    TcHandle { major: TcHandle::CLSACT.major, minor }
}

fn message(ifindex: u32, parent: TcHandle) -> TcMessage {
    let mut message = TcMessage::with_index(ifindex.cast_signed());
    message.header.parent = parent;
    message
}

fn our_filter(ifindex: u32, direction: Direction, (priority, handle): (u16, u32)) -> TcMessage {
    let mut message = message(ifindex, parent(direction));
    message.header.handle = TcHandle::from(handle);
    message.header.info = u32::from(priority) << 16 | u32::from(ALL_PROTOCOLS.to_be());
    message.attributes.push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
    message
}

fn qdisc(ifindex: u32) -> TcMessage {
    let mut message = message(ifindex, TcHandle::CLSACT);
    message.header.handle = TcHandle { major: TcHandle::CLSACT.major, minor: 0 };
    message.attributes.push(TcAttribute::Kind(CLSACT.to_owned()));
    message
}

/// Adds a clsact qdisc to the device; returns whether it had none. Fails if another qdisc has its place, such as `ingress`, which
/// has filters of one direction only.
pub(super) fn add_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<bool> {
    let request = RouteNetlinkMessage::NewQueueDiscipline(qdisc(ifindex));
    match netlink.change(request, NLM_F_CREATE | NLM_F_EXCL) {
        Ok(()) => return Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    match kind_at_clsacts_place(netlink, ifindex)?.filter(|kind| kind != CLSACT) {
        None => Ok(false),
        Some(kind) => Err(io::Error::other(format!(
            "the device has a qdisc `{kind}` in the place of clsact, as of the bandwidth plugin or of traffic shaping: boot Linux 6.6 or \
             newer, which needs no qdisc, or remove it (`tc qdisc del dev DEVICE {kind}`)"
        ))),
    }
}

/// Returns the kind of the qdisc that has the handle of clsact.
fn kind_at_clsacts_place(netlink: &mut Netlink, ifindex: u32) -> io::Result<Option<String>> {
    let all = netlink
        .dump(RouteNetlinkMessage::GetQueueDiscipline(TcMessage::with_index(ifindex.cast_signed())))?;
    let here = all.into_iter().find_map(|answer| match answer {
        RouteNetlinkMessage::NewQueueDiscipline(found) => Some(found).filter(|found| {
            found.header.index == ifindex.cast_signed() && found.header.handle.major == TcHandle::CLSACT.major
        }),
        _ => None,
    });
    Ok(here.and_then(|found| {
        found.attributes.into_iter().find_map(|attribute| match attribute {
            TcAttribute::Kind(kind) => Some(kind),
            _ => None,
        })
    }))
}

/// Removes the clsact qdisc, and every filter on it.
pub(super) fn remove_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<()> {
    netlink.change(RouteNetlinkMessage::DelQueueDiscipline(qdisc(ifindex)), 0)
}

/// Adds Ballast's filter with this priority and handle, or replaces its program in place.
pub(super) fn set(
    netlink: &mut Netlink,
    ifindex: u32,
    direction: Direction,
    place: (u16, u32),
    program: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut message = our_filter(ifindex, direction, place);
    message.attributes.push(TcAttribute::Options(vec![
        TcOption::Bpf(TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned())),
        TcOption::Bpf(TcFilterBpfOption::ProgName(direction.program().to_owned())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    netlink.change(RouteNetlinkMessage::NewTrafficFilter(message), NLM_F_CREATE)
}

/// Replaces the program of a filter of Ballast.
pub(super) fn replace(
    netlink: &mut Netlink,
    ifindex: u32,
    direction: Direction,
    filter: &Filter,
    program: BorrowedFd<'_>,
) -> io::Result<()> {
    set(netlink, ifindex, direction, filter.place(), program)
}

/// Removes a filter of Ballast.
pub(super) fn remove(
    netlink: &mut Netlink,
    ifindex: u32,
    direction: Direction,
    filter: &Filter,
) -> io::Result<()> {
    netlink.change(RouteNetlinkMessage::DelTrafficFilter(our_filter(ifindex, direction, filter.place())), 0)
}

/// Returns the filters of one direction; none if the device has no clsact qdisc, or is gone.
pub(super) fn filters(netlink: &mut Netlink, ifindex: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let request = RouteNetlinkMessage::GetTrafficFilter(message(ifindex, parent(direction)));
    let answers = match netlink.dump(request) {
        Ok(answers) => answers,
        // Kernels return one of these errors if the parent or the device does not exist.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT | libc::ENODEV)) => {
            Vec::new()
        }
        Err(error) => return Err(error),
    };
    Ok(answers.iter().filter_map(read).collect())
}

fn read(answer: &RouteNetlinkMessage) -> Option<Filter> {
    let RouteNetlinkMessage::NewTrafficFilter(message) = answer else { return None };
    let mut filter = Filter {
        priority: (message.header.info >> 16) as u16,
        handle: message.header.handle.into(),
        protocol: u16::from_be(message.header.info as u16),
        name: None,
        program: None,
    };
    // The kernel also lists each priority once without a handle.
    if filter.handle == 0 {
        return None;
    }
    for attribute in &message.attributes {
        let TcAttribute::Options(options) = attribute else { continue };
        for option in options {
            match option {
                TcOption::Bpf(TcFilterBpfOption::ProgName(name)) => filter.name = Some(name.clone()),
                TcOption::Bpf(TcFilterBpfOption::ProgId(id)) => filter.program = Some(*id),
                _ => {}
            }
        }
    }
    Some(filter)
}

#[cfg(test)]
mod tests {
    use super::*;

    const IN: Direction = Direction::Ingress;

    fn ours(priority: u16, handle: u32) -> Filter {
        let name = Some(IN.program().to_owned());
        Filter { priority, handle, protocol: ALL_PROTOCOLS, name, program: Some(7) }
    }

    fn other(priority: u16) -> Filter {
        let name = Some("handle_ingress".to_owned());
        Filter { priority, handle: 1, protocol: ALL_PROTOCOLS, name, program: Some(8) }
    }

    fn priorities_before(filters: &[Filter], priority: u16) -> Vec<u16> {
        before(filters, IN, priority).iter().map(|filter| filter.priority).collect()
    }

    #[test]
    fn filters_before_ours_have_a_lower_number_or_are_newer() {
        let [handle, _] = HANDLES;
        let filters = [other(1), other(2), ours(2, handle), other(2), other(3)];
        assert_eq!(priorities_before(&filters, 2), [1, 2]);
        assert_eq!(priorities_before(&filters, 1), [0_u16; 0], "ours will be the newest of priority 1");
        assert_eq!(priorities_before(&filters, 3), [1, 2, 2]);
        let arp = Filter { protocol: 0x0806, ..other(1) };
        let flower = Filter { program: None, ..other(1) };
        assert_eq!(priorities_before(&[arp, flower, ours(2, handle)], 2), [0_u16; 0]);
    }

    #[test]
    fn a_filter_behind_another_of_its_priority_moves_with_the_other_handle() {
        let [one, two] = HANDLES;
        assert_eq!(handle(&[], IN, 1), one);
        assert_eq!(handle(&[ours(1, one), other(1)], IN, 1), one, "it is replaced in place");
        assert_eq!(handle(&[ours(1, two), other(1)], IN, 1), two);
        assert_eq!(handle(&[other(1), ours(1, one)], IN, 1), two);
        assert_eq!(handle(&[other(1), ours(1, two)], IN, 1), one);
        assert_eq!(handle(&[other(1), ours(2, two)], IN, 1), one, "an earlier agent had another priority");
    }

    #[test]
    fn a_filter_is_in_place_if_it_is_alone_and_first_of_its_priority() {
        let [one, two] = HANDLES;
        assert!(is_in_place(&[other(1), ours(2, one), other(2)], IN, 2));
        assert!(!is_in_place(&[other(2), ours(2, one)], IN, 2));
        assert!(!is_in_place(&[ours(2, two), ours(2, one)], IN, 2));
        assert!(!is_in_place(&[ours(2, one)], IN, 1));
        assert!(!is_in_place(&[other(2)], IN, 2));
    }
}
