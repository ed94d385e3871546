//! Rows of endpoints by their ids, which are given out from the lowest on: a list takes half of what a tree takes.

use std::ops::Range;

use crate::maps::Backend;

/// Rows by id.
#[derive(Clone, Debug, Default)]
pub struct Rows(Vec<Option<Backend>>);

impl Rows {
    /// The row of an id.
    pub fn get(&self, id: u32) -> Option<&Backend> {
        self.0.get(id as usize)?.as_ref()
    }

    /// Whether the id has a row.
    pub fn has(&self, id: u32) -> bool {
        self.get(id).is_some()
    }

    /// Sets the row of an id; returns the one that it had.
    pub fn insert(&mut self, id: u32, row: Backend) -> Option<Backend> {
        let at = id as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, None);
        }
        self.0.get_mut(at)?.replace(row)
    }

    /// Takes the row of an id away.
    pub fn remove(&mut self, id: u32) {
        if let Some(row) = self.0.get_mut(id as usize) {
            *row = None;
        }
    }

    /// All rows, by id.
    pub fn iter(&self) -> impl Iterator<Item = (u32, &Backend)> {
        self.range(0..u32::MAX)
    }

    /// The rows of these ids.
    pub fn range(&self, ids: Range<u32>) -> impl Iterator<Item = (u32, &Backend)> {
        let end = self.0.len().min(ids.end as usize);
        let start = end.min(ids.start as usize);
        let part = self.0.get(start..end).unwrap_or_default();
        part.iter().zip(ids.start..).filter_map(|(row, id)| Some((id, row.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

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
        assert_eq!((rows.get(2), rows.get(5)), (None, Some(&row(51))));
    }

    #[test]
    fn a_place_without_a_row_is_no_larger_than_one_with() {
        assert_eq!(size_of::<Option<Backend>>(), size_of::<Backend>());
    }
}
