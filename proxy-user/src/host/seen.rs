//! Absent once is not gone: what a list of the kernel lacks is removed only by the second list that lacks it, or by the
//! kernel's own message.
//!
//! A dump of netlink is no snapshot: an entry that moves while the kernel lists can be missing, and so can all entries
//! after it. Programs are detached, and addresses withdrawn, only by a [`Present`], which only [`Seen`] creates.

use std::collections::BTreeSet;
use std::io;
use std::ops::Deref;
use std::sync::Arc;
use std::thread::sleep;
use std::time::Duration;

/// How often the first list is requested while changes interrupt it: pods that start after a reboot are changes for a minute.
const ATTEMPTS: u32 = 120;
/// The pause between two attempts.
const PAUSE: Duration = Duration::from_millis(500);

/// An entry of a list.
pub trait Entry: Clone {
    /// What distinguishes the entry from all others, whatever else about it changes.
    type Key: Ord;
    /// Returns the entry's key.
    fn key(&self) -> Self::Key;
}

/// The entries that are there, as far as two lists can say.
#[derive(Clone, Debug)]
pub struct Present<T>(Arc<[T]>);

impl<T> Deref for Present<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

/// What the lists so far have shown.
#[derive(Debug)]
pub struct Seen<T> {
    /// The entries of the last list, in its order.
    listed: Vec<T>,
    /// Entries that only the last list lacked.
    missed: Vec<T>,
}

impl<T: Entry> Seen<T> {
    /// Lists twice, so that what is absent then is absent twice. Lists again after a pause if changes have interrupted the list.
    pub fn start(list: impl Fn() -> io::Result<Vec<T>>) -> io::Result<Self> {
        let list = || {
            for _ in 1..ATTEMPTS {
                match list() {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => sleep(PAUSE),
                    listed => return listed,
                }
            }
            list()
        };
        let mut seen = Self { listed: list()?, missed: Vec::new() };
        seen.add_list(list()?);
        Ok(seen)
    }

    /// Takes a new list.
    pub fn add_list(&mut self, list: Vec<T>) {
        let now: BTreeSet<_> = list.iter().map(T::key).collect();
        let before = std::mem::replace(&mut self.listed, list);
        self.missed = before.into_iter().filter(|entry| !now.contains(&entry.key())).collect();
    }

    /// Takes the kernel's message that some entries are gone.
    pub fn gone(&mut self, is_gone: impl Fn(&T) -> bool) {
        self.listed.retain(|entry| !is_gone(entry));
        self.missed.retain(|entry| !is_gone(entry));
    }

    /// Whether another list is due soon, because the last one lacked an entry.
    pub const fn is_doubtful(&self) -> bool {
        !self.missed.is_empty()
    }

    /// Returns the entries that are there, in the kernel's order.
    pub fn present(&self) -> Present<T> {
        Present(self.listed.iter().chain(&self.missed).cloned().collect())
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    impl Entry for (u32, char) {
        type Key = u32;

        fn key(&self) -> u32 {
            self.0
        }
    }

    fn start(lists: [&[u32]; 2]) -> Seen<(u32, char)> {
        let turn = Cell::new(0);
        let next = || Ok(lists[turn.replace(1)].iter().map(|&key| (key, 'a')).collect());
        Seen::start(next).unwrap()
    }

    fn keys(seen: &Seen<(u32, char)>) -> Vec<u32> {
        seen.present().iter().map(|(key, _)| *key).collect()
    }

    #[test]
    fn entry_is_removed_after_two_lists_without_it() {
        let mut seen = start([&[1, 2, 3], &[1, 2, 3]]);
        seen.add_list(vec![(1, 'a'), (3, 'b')]);
        assert_eq!((keys(&seen), seen.is_doubtful()), (vec![1, 3, 2], true));
        assert_eq!(seen.present()[1], (3, 'b'), "what is listed is as it is now");
        seen.add_list(vec![(2, 'c'), (3, 'b')]);
        assert_eq!(keys(&seen), [2, 3, 1], "absent once, twice, but not in a row");
        seen.add_list(vec![(2, 'c'), (3, 'b')]);
        assert_eq!((keys(&seen), seen.is_doubtful()), (vec![2, 3], false));
    }

    #[test]
    fn entry_is_removed_at_once_after_a_kernel_notification() {
        let mut seen = start([&[1, 2, 3], &[1, 2, 3]]);
        seen.add_list(vec![(1, 'a'), (3, 'a')]);
        seen.gone(|entry| entry.0 != 1);
        assert_eq!(keys(&seen), [1]);
        seen.add_list(vec![(1, 'a'), (2, 'a')]);
        assert_eq!(keys(&seen), [1, 2], "it may come back");
    }

    #[test]
    fn start_lists_again_after_an_interruption() {
        let turn = Cell::new(0);
        let list = || match turn.replace(turn.get() + 1) {
            1 => Err(io::ErrorKind::Interrupted.into()),
            _ => Ok(vec![(1, 'a')]),
        };
        assert_eq!((keys(&Seen::start(list).unwrap()), turn.get()), (vec![1], 3));
        let denied = || -> io::Result<Vec<(u32, char)>> { Err(io::ErrorKind::PermissionDenied.into()) };
        assert_eq!(Seen::start(denied).unwrap_err().kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn start_lists_twice() {
        assert_eq!(keys(&start([&[1, 2], &[2, 3]])), [2, 3, 1]);
        assert_eq!(keys(&start([&[], &[2]])), [2]);
    }
}
