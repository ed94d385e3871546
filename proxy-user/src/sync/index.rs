//! How ids are found by what they belong to.

use std::collections::BTreeMap;

use super::rows::Rows;
use crate::model::{SortedMap, pack};
use crate::plan::BackendAddress;

/// Finds ids by their keys.
pub trait Index<K>: Default {
    /// The id of a key.
    fn find(&self, key: &K) -> Option<u32>;
    /// Gives an id to a key that has none.
    fn put(&mut self, key: K, id: u32);
    /// Takes the key out.
    fn take(&mut self, key: &K) -> Option<u32>;
    /// How many keys there are.
    fn count(&self) -> usize;
    /// After many keys have come.
    fn pack(&mut self);
    /// Every key with its id.
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

/// An endpoint of the Service port of this id.
pub type BackendKey = (u32, BackendAddress);

/// Finds ids of endpoints: those of a Service port are in one list, which takes half of what a tree of all would take.
#[derive(Clone, Debug, Default)]
pub struct ByPort {
    ports: Rows<SortedMap<BackendAddress, u32>>,
    count: usize,
}

impl ByPort {
    /// The endpoints of a Service port.
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
        // Lists are as long as what is in them.
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
