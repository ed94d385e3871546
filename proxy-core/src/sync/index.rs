//! Indexes of ids by their keys.

use std::collections::BTreeMap;

use super::rows::Rows;
use crate::model::{SortedMap, pack};
use crate::plan::BackendAddress;

/// Finds ids by their keys.
pub trait Index<K>: Default {
    /// Returns the id of a key.
    fn find(&self, key: &K) -> Option<u32>;
    /// Adds a key that has no id yet, with its id.
    fn put(&mut self, key: K, id: u32);
    /// Removes a key; returns its id.
    fn take(&mut self, key: &K) -> Option<u32>;
    /// Returns the number of keys.
    fn count(&self) -> usize;
    /// Rebuilds the index compactly, after many keys were added.
    fn pack(&mut self);
    /// Returns every key with its id.
    fn all(&self) -> impl Iterator<Item = (K, u32)>;
}

impl<K: Ord + Clone> Index<K> for BTreeMap<K, u32> {
    fn find(&self, key: &K) -> Option<u32> {
        self.get(key).copied()
    }

    fn put(&mut self, key: K, id: u32) {
        self.insert(key, id);
    }

    fn take(&mut self, key: &K) -> Option<u32> {
        self.remove(key)
    }

    fn count(&self) -> usize {
        self.len()
    }

    fn pack(&mut self) {
        pack(self);
    }

    fn all(&self) -> impl Iterator<Item = (K, u32)> {
        self.iter().map(|(key, id)| (key.clone(), *id))
    }
}

/// An endpoint: the id of its Service port, its address and port.
pub type BackendKey = (u32, BackendAddress);

/// Ids of endpoints. Those of a Service port are in one list, which takes half of the memory of one tree of all endpoints.
#[derive(Clone, Debug, Default)]
pub struct ByPort {
    ports: Rows<SortedMap<BackendAddress, u32>>,
    count: usize,
}

impl ByPort {
    /// Returns the endpoints of a Service port, with their ids.
    pub fn of(&self, service: u32) -> impl Iterator<Item = (BackendKey, u32)> {
        let ids = self.ports.get(service).into_iter().flatten();
        ids.map(move |(at, id)| ((service, *at), *id))
    }
}

impl Index<BackendKey> for ByPort {
    fn find(&self, (service, at): &BackendKey) -> Option<u32> {
        self.ports.get(*service)?.get(at).copied()
    }

    fn put(&mut self, (service, at): BackendKey, id: u32) {
        let old = self.ports.get_or_default(service).insert(at, id);
        self.count += usize::from(old.is_none());
    }

    fn take(&mut self, (service, at): &BackendKey) -> Option<u32> {
        let ids = self.ports.get_mut(*service)?;
        let old = ids.remove(at);
        if ids.is_empty() {
            self.ports.remove(*service);
        }
        self.count -= usize::from(old.is_some());
        old
    }

    fn count(&self) -> usize {
        self.count
    }

    fn pack(&mut self) {
        // Nothing to do: the lists have no unused capacity.
    }

    fn all(&self) -> impl Iterator<Item = (BackendKey, u32)> {
        self.ports.iter().flat_map(|(service, _)| self.of(service))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_found_by_their_port() {
        let at = |port| BackendAddress { address: std::net::Ipv4Addr::LOCALHOST.into(), port };
        let mut index = ByPort::default();
        for (number, key) in [(7, at(2)), (3, at(1)), (7, at(1))].into_iter().enumerate() {
            index.put(key, number as u32);
        }
        assert!(index.all().eq([((3, at(1)), 1), ((7, at(1)), 2), ((7, at(2)), 0)]));
        assert!(index.of(7).eq([((7, at(1)), 2), ((7, at(2)), 0)]) && index.of(8).next().is_none());
        assert_eq!((index.find(&(7, at(2))), index.find(&(3, at(2)))), (Some(0), None));
        assert_eq!(
            [index.take(&(3, at(1))), index.take(&(3, at(1))), index.take(&(7, at(9)))],
            [Some(1), None, None]
        );
        assert_eq!((index.count(), index.ports.len()), (2, 1));
    }
}
