//! Packet programs on kernels without TCX (before 6.6): filters of the clsact qdisc.
//!
//! Such a filter belongs to its device, not to a file descriptor: it needs no pin, and stays when the agent ends. Ballast's
//! filter has a fixed priority and handle, so a later agent replaces it in place.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rtnetlink::packet_core::{NLM_F_CREATE, NLM_F_EXCL};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::tc::{
    TcAttribute, TcBpfFlags, TcFilterBpf, TcFilterBpfOption, TcHandle, TcMessage, TcOption,
};

use super::hooks::Direction;
use crate::host::netlink::Netlink;

/// A high priority, but not the highest: another filter can come before Ballast's.
pub(super) const PRIORITY: u16 = 2;
/// The handle of Ballast's filter among the filters of that priority.
const HANDLE: u32 = 0x0ba1_1a57;
/// `ETH_P_ALL`: packets of every protocol.
const ALL_PROTOCOLS: u16 = 3;
const CLSACT: &str = "clsact";

/// A filter on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Filter {
    pub priority: u16,
    pub handle: u32,
    /// Its name if it is a BPF filter.
    pub name: Option<String>,
    /// Id of its program.
    pub program: Option<u32>,
}

impl Filter {
    /// Whether the filter has Ballast's priority and handle; a filter of another tool may have both.
    pub(super) fn has_handle(&self) -> bool {
        self.priority == PRIORITY && self.handle == HANDLE
    }

    /// Whether the filter is Ballast's.
    pub(super) fn is_ours(&self, direction: Direction) -> bool {
        self.has_handle() && self.name.as_deref() == Some(direction.program())
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

fn our_filter(ifindex: u32, direction: Direction) -> TcMessage {
    let mut message = message(ifindex, parent(direction));
    message.header.handle = TcHandle::from(HANDLE);
    message.header.info = u32::from(PRIORITY) << 16 | u32::from(ALL_PROTOCOLS.to_be());
    message.attributes.push(TcAttribute::Kind(TcFilterBpf::KIND.to_owned()));
    message
}

fn qdisc(ifindex: u32) -> TcMessage {
    let mut message = message(ifindex, TcHandle::CLSACT);
    message.header.handle = TcHandle { major: TcHandle::CLSACT.major, minor: 0 };
    message.attributes.push(TcAttribute::Kind(CLSACT.to_owned()));
    message
}

/// Adds a clsact qdisc to the device; returns whether it had none.
pub(super) fn add_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<bool> {
    let request = RouteNetlinkMessage::NewQueueDiscipline(qdisc(ifindex));
    match netlink.change(request, NLM_F_CREATE | NLM_F_EXCL) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes the clsact qdisc, and every filter on it.
pub(super) fn remove_qdisc(netlink: &mut Netlink, ifindex: u32) -> io::Result<()> {
    netlink.change(RouteNetlinkMessage::DelQueueDiscipline(qdisc(ifindex)), 0)
}

/// Adds Ballast's filter, or replaces its program in place.
pub(super) fn set(
    netlink: &mut Netlink,
    ifindex: u32,
    direction: Direction,
    program: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut message = our_filter(ifindex, direction);
    message.attributes.push(TcAttribute::Options(vec![
        TcOption::Bpf(TcFilterBpfOption::ProgFd(program.as_raw_fd().cast_unsigned())),
        TcOption::Bpf(TcFilterBpfOption::ProgName(direction.program().to_owned())),
        TcOption::Bpf(TcFilterBpfOption::Flags(TcBpfFlags::DirectAction)),
    ]));
    netlink.change(RouteNetlinkMessage::NewTrafficFilter(message), NLM_F_CREATE)
}

/// Removes Ballast's filter.
pub(super) fn remove(netlink: &mut Netlink, ifindex: u32, direction: Direction) -> io::Result<()> {
    netlink.change(RouteNetlinkMessage::DelTrafficFilter(our_filter(ifindex, direction)), 0)
}

/// Returns the filters of one direction; none if the device has no clsact qdisc.
pub(super) fn filters(netlink: &mut Netlink, ifindex: u32, direction: Direction) -> io::Result<Vec<Filter>> {
    let request = RouteNetlinkMessage::GetTrafficFilter(message(ifindex, parent(direction)));
    let answers = match netlink.dump(request) {
        Ok(answers) => answers,
        // Kernels return one of these errors if the parent does not exist.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT)) => Vec::new(),
        Err(error) => return Err(error),
    };
    Ok(answers.iter().filter_map(read).collect())
}

fn read(answer: &RouteNetlinkMessage) -> Option<Filter> {
    let RouteNetlinkMessage::NewTrafficFilter(message) = answer else { return None };
    let mut filter = Filter {
        priority: (message.header.info >> 16) as u16,
        handle: message.header.handle.into(),
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
