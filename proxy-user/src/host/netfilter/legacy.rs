//! Reads the chains of iptables' older kernel interface (`iptables-legacy`), which nftables does not show: like
//! `iptables`, by `getsockopt` (`include/uapi/linux/netfilter_ipv4/ip_tables.h`, `.../ip6_tables.h`).

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, UdpSocket};
use std::os::fd::{AsRawFd as _, OwnedFd};

/// How the tables of one address family are requested, and the layout of their entries.
#[derive(Clone, Copy, Debug)]
struct Family {
    name: &'static str,
    /// The file in which the kernel lists the existing tables of this network namespace. A request for another table
    /// would create it.
    tables: &'static str,
    level: libc::c_int,
    /// Offset of `target_offset` and `next_offset` in `ipt_entry`, `ip6t_entry`.
    offsets: usize,
}

const FAMILIES: [Family; 2] = [
    Family { name: "ip", tables: "/proc/thread-self/net/ip_tables_names", level: libc::SOL_IP, offsets: 88 },
    Family {
        name: "ip6",
        tables: "/proc/thread-self/net/ip6_tables_names",
        level: libc::SOL_IPV6,
        offsets: 140,
    },
];

/// How often a table is read while it changes.
const ATTEMPTS: u32 = 10;

/// `IPT_SO_GET_INFO`, `IPT_SO_GET_ENTRIES`; the same numbers for IPv6.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// The length of a table's name, in both requests.
const NAME: usize = 32;
/// The size of `struct ipt_getinfo`, and the offset of the size of all entries in it.
const INFO: usize = 84;
const INFO_SIZE: usize = 80;
/// The size of `struct ipt_get_entries`: name and size, padded to a multiple of eight; the entries follow.
const ENTRIES: usize = 40;
/// `struct xt_entry_target`: the offset of the name, and the size of the struct. In a target `ERROR`, the name of a
/// chain follows.
const TARGET_NAME: usize = 2;
const TARGET: usize = 32;

/// Returns the user-defined chains: family, table, name.
pub(super) fn chains() -> io::Result<Vec<(&'static str, String, String)>> {
    let mut all = Vec::new();
    for (family, table) in tables() {
        let found = read_undisturbed(family, &table)?;
        let entries = found.get(ENTRIES..).unwrap_or_default();
        all.extend(chains_in(entries, family.offsets).map(|chain| (family.name, table.clone(), chain)));
    }
    Ok(all)
}

/// Returns the size of the entries of all tables in bytes; a table whose size cannot be read counts as empty.
pub(super) fn size() -> usize {
    let of = |(family, table): (Family, String)| {
        socket(family).and_then(|socket| table_size(&socket, family, &table)).unwrap_or_default()
    };
    tables().map(of).sum()
}

/// Returns the existing tables.
fn tables() -> impl Iterator<Item = (Family, String)> {
    FAMILIES.into_iter().flat_map(|family| {
        // If there is no file, the kernel has no such tables.
        let names = fs::read_to_string(family.tables).unwrap_or_default();
        names.lines().map(|table| (family, table.to_owned())).collect::<Vec<_>>()
    })
}

/// Returns the answer with the entries of a table ([`ENTRIES`]); reads it again if it was changed meanwhile.
fn read_undisturbed(family: Family, table: &str) -> io::Result<Vec<u8>> {
    let mut found = read(family, table);
    for _ in 1..ATTEMPTS {
        match &found {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => found = read(family, table),
            _ => break,
        }
    }
    found
}

fn socket(family: Family) -> io::Result<OwnedFd> {
    let any = if family.level == libc::SOL_IP {
        UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?
    } else {
        UdpSocket::bind((Ipv6Addr::UNSPECIFIED, 0))?
    };
    Ok(OwnedFd::from(any))
}

/// Returns the size of the entries of a table.
fn table_size(socket: &OwnedFd, family: Family, table: &str) -> io::Result<usize> {
    let mut info = vec![0; INFO];
    name(&mut info, table);
    ask(socket, family.level, GET_INFO, &mut info)?;
    Ok(word(&info, INFO_SIZE).unwrap_or_default() as usize)
}

/// Returns the answer with the entries of a table ([`ENTRIES`]); `EAGAIN` if the table changed between the two requests.
fn read(family: Family, table: &str) -> io::Result<Vec<u8>> {
    let socket = socket(family)?;
    let size = table_size(&socket, family, table)?;
    let mut entries = vec![0; ENTRIES + size];
    name(&mut entries, table);
    entries[NAME..NAME + 4].copy_from_slice(&(size as u32).to_ne_bytes());
    ask(&socket, family.level, GET_ENTRIES, &mut entries)?;
    Ok(entries)
}

fn name(request: &mut [u8], table: &str) {
    let bytes = table.as_bytes();
    let length = bytes.len().min(NAME - 1);
    request[..length].copy_from_slice(&bytes[..length]);
}

fn ask(socket: &OwnedFd, level: libc::c_int, what: libc::c_int, buffer: &mut [u8]) -> io::Result<()> {
    let mut length = buffer.len() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes; `length` is the length of the buffer.
    let result = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, what, buffer.as_mut_ptr().cast(), &raw mut length)
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|word| u32::from_ne_bytes(*word))
}

fn short(bytes: &[u8], at: usize) -> Option<usize> {
    bytes.get(at..)?.first_chunk().map(|word| u16::from_ne_bytes(*word) as usize)
}

/// Returns the names of the user-defined chains. Such a chain begins with an entry whose target `ERROR` contains the
/// chain's name; the end of the table is such an entry with the name `ERROR`.
fn chains_in(mut entries: &[u8], offsets: usize) -> impl Iterator<Item = String> {
    std::iter::from_fn(move || {
        loop {
            let (target, next) = (short(entries, offsets)?, short(entries, offsets + 2)?);
            let of_target = entries.get(target..)?;
            let rest = entries.get(next..).filter(|_| next > 0)?;
            let name = text(of_target, TARGET_NAME);
            entries = rest;
            if name.as_deref() == Some("ERROR")
                && let Some(chain) = text(of_target, TARGET).filter(|chain| chain != "ERROR")
            {
                return Some(chain);
            }
        }
    })
}

/// Returns a zero-terminated string.
fn text(bytes: &[u8], at: usize) -> Option<String> {
    let bytes = bytes.get(at..)?;
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some(String::from_utf8_lossy(&bytes[..end]).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OFFSETS: usize = 88;
    const ENTRY: usize = 112;

    fn entry(target: &str, data: &str) -> Vec<u8> {
        let length = ENTRY + TARGET + 32;
        let mut bytes = vec![0; length];
        bytes[OFFSETS..OFFSETS + 2].copy_from_slice(&(ENTRY as u16).to_ne_bytes());
        bytes[OFFSETS + 2..OFFSETS + 4].copy_from_slice(&(length as u16).to_ne_bytes());
        for (at, text) in [(ENTRY + TARGET_NAME, target), (ENTRY + TARGET, data)] {
            bytes[at..at + text.len()].copy_from_slice(text.as_bytes());
        }
        bytes
    }

    #[test]
    fn chains_are_where_a_target_is_an_error() {
        let table = [
            entry("", ""),
            entry("ERROR", "KUBE-SERVICES"),
            entry("DNAT", "KUBE-SVC-A"),
            entry("ERROR", "KUBE-SEP-B"),
            entry("ERROR", "ERROR"),
        ]
        .concat();
        let chains: Vec<_> = chains_in(&table, OFFSETS).collect();
        assert_eq!(chains, ["KUBE-SERVICES", "KUBE-SEP-B"]);
        for length in 0..table.len() {
            assert!(chains_in(&table[..length], OFFSETS).count() <= 2);
        }
    }
}
