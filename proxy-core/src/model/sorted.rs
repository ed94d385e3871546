//! A map and a set that take little more memory than their entries.

use std::borrow::Borrow;
use std::collections::BTreeMap;

/// Builds a tree again without empty places: a tree that grew in the order of its keys is half empty.
pub fn pack<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    *map = std::mem::take(map).into_iter().collect();
}

/// A map in one sorted list. Most maps of the model have one to a few entries, for which a `BTreeMap` allocates a node with
/// room for eleven. A lookup is a binary search; an insertion moves all entries behind the new one.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SortedMap<K, V>(Vec<(K, V)>);

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<K: Ord, V> SortedMap<K, V> {
    /// Returns an empty map.
    pub const fn new() -> Self {
        Self(Vec::new())
    }

    fn place<Q: Ord + ?Sized>(&self, key: &Q) -> Result<usize, usize>
    where
        K: Borrow<Q>,
    {
        self.0.binary_search_by(|(known, _)| known.borrow().cmp(key))
    }

    /// Returns the value of a key.
    pub fn get<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.place(key).ok().and_then(|at| self.0.get(at)).map(|(_, value)| value)
    }

    /// Returns the value of a key, mutable.
    pub fn get_mut<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<&mut V>
    where
        K: Borrow<Q>,
    {
        let at = self.place(key).ok()?;
        self.0.get_mut(at).map(|(_, value)| value)
    }

    /// Whether the key is there.
    pub fn contains_key<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.place(key).is_ok()
    }

    /// Sets the value of a key; returns its previous value.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.place(&key) {
            Ok(at) => self.0.get_mut(at).map(|(_, known)| std::mem::replace(known, value)),
            Err(at) => {
                // The capacity grows by an eighth and is not doubled: most maps never grow again.
                if self.0.len() == self.0.capacity() {
                    self.0.reserve_exact(1 + self.0.len() / 8);
                }
                self.0.insert(at, (key, value));
                None
            }
        }
    }

    /// Removes a key; returns its value.
    pub fn remove<Q: Ord + ?Sized>(&mut self, key: &Q) -> Option<V>
    where
        K: Borrow<Q>,
    {
        self.place(key).ok().map(|at| self.0.remove(at).1)
    }

    /// Removes and returns the first entry.
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        (!self.0.is_empty()).then(|| self.0.remove(0))
    }

    /// Returns the number of entries.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the map is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the entries, by key.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&K, &V)> + ExactSizeIterator {
        self.0.iter().map(pair)
    }

    /// Returns the keys, in order.
    pub fn keys(&self) -> impl DoubleEndedIterator<Item = &K> + ExactSizeIterator {
        self.0.iter().map(|(key, _)| key)
    }

    /// Returns the values, by key.
    pub fn values(&self) -> impl DoubleEndedIterator<Item = &V> + ExactSizeIterator {
        self.0.iter().map(|(_, value)| value)
    }

    /// Returns the values, by key, mutable.
    pub fn values_mut(&mut self) -> impl DoubleEndedIterator<Item = &mut V> + ExactSizeIterator {
        self.0.iter_mut().map(|(_, value)| value)
    }

    /// Returns the entries, by key, with mutable values.
    pub fn iter_mut(&mut self) -> impl DoubleEndedIterator<Item = (&K, &mut V)> + ExactSizeIterator {
        self.0.iter_mut().map(|(key, value)| (&*key, value))
    }

    /// Consumes the map and returns the values, by key.
    pub fn into_values(self) -> impl DoubleEndedIterator<Item = V> + ExactSizeIterator {
        self.0.into_iter().map(|(_, value)| value)
    }
}

const fn pair<K, V>((key, value): &(K, V)) -> (&K, &V) {
    (key, value)
}

impl<K: Ord, V> FromIterator<(K, V)> for SortedMap<K, V> {
    /// If several entries have the same key, the last one stays.
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> Self {
        let mut all: Vec<(K, V)> = entries.into_iter().collect();
        if !all.is_sorted_by(|(a, _), (b, _)| a < b) {
            // The sort is stable, and `dedup_by` keeps the first of several: in reverse order, this is the last one.
            all.reverse();
            all.sort_by(|(a, _), (b, _)| a.cmp(b));
            all.dedup_by(|(a, _), (b, _)| a == b);
        }
        all.shrink_to_fit();
        Self(all)
    }
}

impl<K: Ord, V, const N: usize> From<[(K, V); N]> for SortedMap<K, V> {
    fn from(entries: [(K, V); N]) -> Self {
        entries.into_iter().collect()
    }
}

impl<K, V> IntoIterator for SortedMap<K, V> {
    type Item = (K, V);
    type IntoIter = std::vec::IntoIter<(K, V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<'a, K, V> IntoIterator for &'a SortedMap<K, V> {
    type Item = (&'a K, &'a V);
    type IntoIter = std::iter::Map<std::slice::Iter<'a, (K, V)>, fn(&'a (K, V)) -> (&'a K, &'a V)>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.iter().map(pair)
    }
}

/// A set in one sorted list, like [`SortedMap`].
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SortedSet<T>(SortedMap<T, ()>);

impl<T> Default for SortedSet<T> {
    fn default() -> Self {
        Self(SortedMap::default())
    }
}

impl<T: Ord> SortedSet<T> {
    /// Inserts an item; returns whether the set did not contain it.
    pub fn insert(&mut self, item: T) -> bool {
        self.0.insert(item, ()).is_none()
    }

    /// Removes an item; returns whether the set contained it.
    pub fn remove(&mut self, item: &T) -> bool {
        self.0.remove(item).is_some()
    }

    /// Whether the set contains the item.
    pub fn contains<Q: Ord + ?Sized>(&self, item: &Q) -> bool
    where
        T: Borrow<Q>,
    {
        self.0.contains_key(item)
    }

    /// Returns the first item.
    pub fn first(&self) -> Option<&T> {
        self.0.keys().next()
    }

    /// Returns the number of items.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns all items, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &T> + ExactSizeIterator {
        self.0.keys()
    }
}

impl<T: Ord> FromIterator<T> for SortedSet<T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self(items.into_iter().map(|item| (item, ())).collect())
    }
}

impl<T: Ord, const N: usize> From<[T; N]> for SortedSet<T> {
    fn from(items: [T; N]) -> Self {
        items.into_iter().collect()
    }
}

impl<'a, T> IntoIterator for &'a SortedSet<T> {
    type Item = &'a T;
    type IntoIter = std::iter::Map<std::slice::Iter<'a, (T, ())>, fn(&'a (T, ())) -> &'a T>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.0.iter().map(|(item, ())| item)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn sorted_map_behaves_like_a_btree_map(steps in prop::collection::vec((0u8..4, 0u8..12, any::<u16>()), 0..60)) {
            let (mut ours, mut theirs) = (SortedMap::new(), BTreeMap::new());
            for (action, key, value) in &steps {
                match action {
                    0 | 1 => prop_assert_eq!(ours.insert(*key, *value), theirs.insert(*key, *value)),
                    2 => prop_assert_eq!(ours.remove(key), theirs.remove(key)),
                    _ => prop_assert_eq!(ours.pop_first(), theirs.pop_first()),
                }
                prop_assert_eq!(ours.get(key), theirs.get(key));
                prop_assert_eq!(ours.contains_key(key), theirs.contains_key(key));
            }
            prop_assert!(ours.iter().eq(theirs.iter()) && (&ours).into_iter().eq(&theirs));
            prop_assert_eq!(ours.len(), theirs.len());
            let all = steps.iter().map(|(_, key, value)| (*key, *value));
            let (ours, theirs): (SortedMap<_, _>, BTreeMap<_, _>) = (all.clone().collect(), all.collect());
            prop_assert!(ours.keys().eq(theirs.keys()) && ours.values().eq(theirs.values()));
            prop_assert!(ours.into_values().eq(theirs.into_values()));
        }
    }

    #[test]
    fn sorted_set_is_sorted_and_has_no_duplicates() {
        let mut set: SortedSet<u8> = [3, 1, 3, 2].into_iter().collect();
        assert!(set.iter().eq(&[1, 2, 3]) && !set.insert(2) && set.insert(0));
        assert!(set.remove(&3) && !set.remove(&3) && !set.contains(&3) && set.contains(&1));
        assert_eq!((set.first(), set.len(), set.is_empty()), (Some(&0), 3, false));
        assert!((&set).into_iter().eq(set.iter()));
    }
}
