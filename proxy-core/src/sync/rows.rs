//! Rows by id. Ids are allocated from the lowest on, so a list takes half of the memory of a tree.

use std::ops::Range;

use proxy_common::name::PortName;

/// Rows by id.
#[derive(Clone, Debug)]
pub struct Rows<T> {
    rows: Vec<Option<T>>,
    len: usize,
}

impl<T> Default for Rows<T> {
    fn default() -> Self {
        Self { rows: Vec::new(), len: 0 }
    }
}

impl<T> Rows<T> {
    /// Returns the number of ids with a row.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns the row of an id.
    pub fn get(&self, id: u32) -> Option<&T> {
        self.rows.get(id as usize)?.as_ref()
    }

    /// Returns the row of an id, mutable.
    pub fn get_mut(&mut self, id: u32) -> Option<&mut T> {
        self.rows.get_mut(id as usize)?.as_mut()
    }

    /// Whether the id has a row.
    pub fn has(&self, id: u32) -> bool {
        self.get(id).is_some()
    }

    /// Sets the row of an id; returns its previous row.
    pub fn insert(&mut self, id: u32, row: T) -> Option<T> {
        let at = id as usize;
        if self.rows.len() <= at {
            self.rows.resize_with(at + 1, || None);
        }
        let old = self.rows.get_mut(at)?.replace(row);
        self.len += usize::from(old.is_none());
        old
    }

    /// Returns the row of an id, mutable; inserts the default one if there is none.
    pub fn get_or_default(&mut self, id: u32) -> &mut T
    where
        T: Default,
    {
        let at = id as usize;
        if self.rows.len() <= at {
            self.rows.resize_with(at + 1, || None);
        }
        let row = &mut self.rows[at];
        self.len += usize::from(row.is_none());
        row.get_or_insert_default()
    }

    /// Removes the row of an id and returns it.
    pub fn remove(&mut self, id: u32) -> Option<T> {
        let old = self.rows.get_mut(id as usize)?.take();
        self.len -= usize::from(old.is_some());
        old
    }

    /// Returns all rows, sorted by id.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &T)> {
        self.range(0..u32::MAX)
    }

    /// Returns the rows of these ids.
    pub fn range(&self, ids: Range<u32>) -> impl Iterator<Item = (u32, &T)> {
        let end = self.rows.len().min(ids.end as usize);
        let start = end.min(ids.start as usize);
        let part = self.rows.get(start..end).unwrap_or_default();
        part.iter().zip(ids.start..).filter_map(|(row, id)| Some((id, row.as_ref()?)))
    }
}

/// A row of `names`, without its padding zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShortName {
    length: u16,
    proto: u8,
    family: u8,
    text: Box<[u8]>,
}

impl From<&PortName> for ShortName {
    fn from(name: &PortName) -> Self {
        let PortName { length, proto, family, text } = name;
        let end = text.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        Self { length: *length, proto: *proto, family: *family, text: text[..end].into() }
    }
}

impl PartialEq<PortName> for ShortName {
    fn eq(&self, name: &PortName) -> bool {
        let Self { length, proto, family, text } = self;
        let (same, rest) = name.text.split_at(text.len().min(name.text.len()));
        (*length, *proto, *family) == (name.length, name.proto, name.family)
            && **text == *same
            && rest.iter().all(|byte| *byte == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::store::Backend;

    fn row(port: u16) -> Backend {
        let addr = Ipv4Addr::LOCALHOST.into();
        Backend { addr, port, proto: 6, state: 1, service: 1, flags: 0 }
    }

    #[test]
    fn rows_are_found_by_their_ids() {
        let mut rows = Rows::default();
        assert_eq!(rows.insert(5, row(50)), None);
        assert_eq!(rows.insert(2, row(20)), None);
        assert_eq!(rows.insert(5, row(51)), Some(row(50)));
        assert!(rows.has(2) && !rows.has(3) && !rows.has(u32::MAX));
        assert!(rows.iter().map(|(id, row)| (id, row.port)).eq([(2, 20), (5, 51)]));
        assert!(rows.range(3..9).map(|(id, _)| id).eq([5]) && rows.range(7..9).next().is_none());
        assert!(rows.range(2..5).map(|(id, _)| id).eq([2]));
        rows.remove(2);
        rows.remove(77);
        assert_eq!((rows.len(), rows.iter().count()), (1, 1));
        assert_eq!((rows.get(2), rows.get(5)), (None, Some(&row(51))));
    }

    #[test]
    fn a_short_name_equals_the_one_that_it_was_made_of() {
        let name = PortName::new("default/web:http", 6, 4).unwrap();
        let short = ShortName::from(&name);
        assert!(short == name && short.text.len() == 16);
        let mut other = name;
        other.text[20] = 1;
        let of_other = ShortName::from(&other);
        assert!(short != other && of_other == other);
        for other in [
            PortName { proto: 17, ..name },
            PortName { family: 6, ..name },
            PortName { length: 15, ..name },
            PortName::new("default/web:htt", 6, 4).unwrap(),
            PortName::new("default/web:http2", 6, 4).unwrap(),
        ] {
            assert!(short != other);
        }
        let mut rows = Rows::<Vec<u8>>::default();
        rows.get_or_default(3).extend([1, 2]);
        rows.get_or_default(3).push(3);
        assert_eq!((rows.len(), rows.remove(3), rows.len()), (1, Some(vec![1, 2, 3]), 0));
    }

    #[test]
    fn optional_row_is_no_larger_than_a_row() {
        assert_eq!(size_of::<Option<Backend>>(), size_of::<Backend>());
    }
}
