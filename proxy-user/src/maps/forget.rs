//! Removes what clients and sockets need no longer from `affinity`, `affinity6`, `affinity_netns`, `sockets` and `sockets6`.
//!
//! These maps allocate memory for an entry when it is added. An LRU map would evict entries by itself, but has memory for all of
//! them from the start. If a map is nearly full nevertheless, its oldest entries go, as they would in an LRU map.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::AsFd as _;
use std::path::Path;

use proxy_common::abi::Plain;
use proxy_common::affinity::{AffinityEntry, AffinityKey, NetnsAffinityKey};
use proxy_common::conntrack;
use proxy_common::map_names as names;
use proxy_common::name::PortName;
use proxy_common::service::{ServiceEntry, ServiceKey};
use proxy_common::socket::{SocketEntry, SocketKey};

use super::family::MapFamily;
use super::{settings, sys, view};

/// Seconds after which a peer of an unconnected socket is forgotten: the next datagram to its Service may go to another
/// endpoint. (`nf_conntrack` forgets after two minutes.)
const PEER_SECS: u32 = 3_600;
/// Seconds for which an entry stays after it has expired: a client may come back in the moment when the entry is removed.
const GRACE_SECS: u32 = 60;

/// Removes the entries that are no longer needed from the maps pinned in `folder`; returns how many.
pub fn sweep(folder: &Path) -> io::Result<usize> {
    let config = sys::pinned(folder, names::CONFIG)?;
    let hz = settings::read(config.fd().as_fd())?.hz;
    let mut timeouts = BTreeMap::new();
    timeouts_of::<[u8; 4]>(folder, &mut timeouts)?;
    timeouts_of::<[u8; 16]>(folder, &mut timeouts)?;
    let namespaces = namespaces(folder)?;
    let now = view::now(hz);
    let age = |last_used: u32| conntrack::age(now, last_used, hz);
    let of_client = |service: u32, entry: &AffinityEntry| {
        let age = age(entry.last_used);
        // A Service may have got its timeout since they were read.
        let timeout = timeouts.get(&service).map_or(GRACE_SECS, |secs| secs.saturating_add(GRACE_SECS));
        let group = (namespaces.get(&service).copied().unwrap_or(u32::MAX), service);
        (age <= timeout.saturating_mul(hz)).then_some((group, age))
    };
    // Neither key nor value says whose socket it is, so the sockets of all pods are one group.
    let of_socket = |last_used| {
        let age = age(last_used);
        (age <= PEER_SECS.saturating_mul(hz)).then_some(((0, 0), age))
    };
    Ok(sweep_map(folder, names::AFFINITY, |key: &AffinityKey<[u8; 4]>, entry| of_client(key.service, entry))?
        + sweep_map(folder, names::AFFINITY6, |key: &AffinityKey<[u8; 16]>, entry| {
            of_client(key.service, entry)
        })?
        + sweep_map(folder, names::AFFINITY_NETNS, |key: &NetnsAffinityKey, entry| {
            of_client(key.service, entry)
        })?
        + sweep_map(folder, names::SOCKETS, |_: &SocketKey<[u8; 4]>, entry: &SocketEntry<[u8; 4]>| {
            of_socket(entry.last_used)
        })?
        + sweep_map(folder, names::SOCKETS6, |_: &SocketKey<[u8; 16]>, entry: &SocketEntry<[u8; 16]>| {
            of_socket(entry.last_used)
        })?)
}

/// Adds the timeouts of Service ports with session affinity, in seconds, by id.
fn timeouts_of<A: MapFamily>(folder: &Path, timeouts: &mut BTreeMap<u32, u32>) -> io::Result<()> {
    let map = sys::pinned(folder, A::SERVICES)?;
    let (rows, _) = sys::lookup::<ServiceKey<A>, ServiceEntry>(map.fd().as_fd(), None, usize::MAX)?;
    let sticky = rows.iter().filter(|(_, entry)| entry.affinity_secs > 0);
    timeouts.extend(sticky.map(|(_, entry)| (entry.id, entry.affinity_secs)));
    Ok(())
}

/// Returns a number for the namespace of each Service port, by the port's id.
fn namespaces(folder: &Path) -> io::Result<BTreeMap<u32, u32>> {
    let map = sys::pinned(folder, names::NAMES)?;
    let (rows, _) = sys::lookup::<u32, PortName>(map.fd().as_fd(), None, usize::MAX)?;
    let mut numbers = BTreeMap::new();
    let number_of = |(id, name): &(u32, PortName)| {
        let namespace = name.as_str().split('/').next().unwrap_or_default();
        let next = numbers.len() as u32;
        (*id, *numbers.entry(namespace.to_owned()).or_insert(next))
    };
    Ok(rows.iter().map(number_of).collect())
}

/// A group of entries that have a share of a map: a namespace, and a Service port, which has a share of the namespace's.
type Group = (u32, u32);

/// Removes entries from one map. `kept`: the group of an entry, and how long it was not used, in jiffies; `None`: it is no longer
/// needed.
fn sweep_map<K: Plain, V: Plain>(
    folder: &Path,
    name: &str,
    kept: impl Fn(&K, &V) -> Option<(Group, u32)>,
) -> io::Result<usize> {
    let map = sys::pinned(folder, name)?;
    let capacity = map.info().map_err(io::Error::other)?.max_entries() as usize;
    let (rows, _) = sys::lookup::<K, V>(map.fd().as_fd(), None, usize::MAX)?;
    let gone = to_remove(rows, capacity, kept);
    sys::delete(map.fd().as_fd(), &gone).map_err(|stopped| stopped.source)?;
    Ok(gone.len())
}

/// Returns the keys of those entries that are no longer needed, and if more than seven eighths of the entries remain, of
/// others, until a quarter of the map is free: of the namespaces with the most entries, of the Service ports with the most, the oldest
/// ones first. So neither a flood of clients of one Service nor a namespace with many takes anything from the others. `kept`: the group and the age of an entry that is needed.
fn to_remove<K: Copy, V>(
    rows: Vec<(K, V)>,
    capacity: usize,
    kept: impl Fn(&K, &V) -> Option<(Group, u32)>,
) -> Vec<K> {
    let (mut needed, mut gone) = (Vec::new(), Vec::new());
    for (key, value) in rows {
        match kept(&key, &value) {
            Some((group, age)) => needed.push((age, group, key)),
            None => gone.push(key),
        }
    }
    if needed.len() > capacity / 8 * 7 {
        let mut counts: BTreeMap<u32, BTreeMap<u32, usize>> = BTreeMap::new();
        for (_, (namespace, service), _) in &needed {
            *counts.entry(*namespace).or_default().entry(*service).or_default() += 1;
        }
        let sum = |ports: &BTreeMap<u32, usize>| ports.values().sum();
        let of_namespace = share(counts.values().map(sum).collect(), capacity / 4 * 3);
        let most = |ports: &BTreeMap<u32, usize>| share(ports.values().copied().collect(), of_namespace);
        let most: BTreeMap<u32, usize> =
            counts.iter().map(|(number, ports)| (*number, most(ports))).collect();
        needed.sort_unstable_by_key(|(age, ..)| std::cmp::Reverse(*age));
        for (_, (namespace, service), key) in needed {
            let count = counts.get_mut(&namespace).and_then(|ports| ports.get_mut(&service));
            if let Some(count) = count.filter(|count| Some(&**count) > most.get(&namespace)) {
                *count -= 1;
                gone.push(key);
            }
        }
    }
    gone
}

/// Returns how many entries each group may have at most, so that all together have no more than `room`.
fn share(mut counts: Vec<usize>, mut room: usize) -> usize {
    counts.sort_unstable();
    let groups = counts.len();
    for (number, count) in counts.into_iter().enumerate() {
        let share = room / (groups - number);
        if count > share {
            return share;
        }
        room -= count;
    }
    usize::MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_entries_without_need_go_while_there_is_room() {
        let rows: Vec<(u32, u32)> = (0..70).map(|n| (n, n)).collect();
        let gone = to_remove(rows, 80, |_, age| (*age < 65).then_some(((0, 0), *age)));
        assert_eq!(gone, [65, 66, 67, 68, 69]);
    }

    #[test]
    fn the_oldest_entries_go_when_a_map_is_nearly_full() {
        let rows: Vec<(u32, u32)> = (0..75).map(|n| (n, 1_000 - n)).collect();
        let gone = to_remove(rows, 80, |_, age| Some(((0, 0), *age)));
        assert_eq!(gone, (0..15).collect::<Vec<_>>(), "a quarter is free");
    }

    #[test]
    fn a_flood_of_one_group_takes_nothing_from_the_others() {
        let old = (0..1000).map(|n| (n, ((0, 1), 5_000)));
        let young = (1000..10_000).map(|n| (n, ((0, 2), 1)));
        let gone = to_remove(old.chain(young).collect(), 10_000, |_, kept| Some(*kept));
        assert!(gone.len() == 2_500 && gone.iter().all(|key| *key >= 1000), "{}", gone.len());
        assert_eq!(share(vec![5, 100, 100], 105), 50);
    }

    #[test]
    fn a_namespace_of_many_ports_takes_nothing_from_the_others() {
        let old = (0..1000).map(|n| (n, ((0, 1), 5_000)));
        let young = (1000..10_000).map(|n| (n, ((1, 2 + n % 1_300), 1)));
        let gone = to_remove(old.chain(young).collect(), 10_000, |_, kept| Some(*kept));
        assert!(gone.len() > 2_000 && gone.iter().all(|key| *key >= 1000), "{}", gone.len());
    }

    #[test]
    fn shares_of_groups() {
        assert_eq!(share(vec![5, 5], 100), usize::MAX);
    }
}
