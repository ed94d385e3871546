//! The names of objects.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::fmt;
use std::ops::Deref;
use std::sync::{LazyLock, Mutex, PoisonError};

use arcstr::ArcStr;

use super::SortedSet;

/// An interned name: the text is in memory once, and each use takes one pointer. The names of nodes, ports and namespaces
/// occur in every endpoint and Service of a cluster.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(ArcStr);

/// All names in use, and some that are no longer used.
static NAMES: LazyLock<Mutex<Pool>> = LazyLock::new(Mutex::default);

/// Up to this number of names, the pool does not look for unused ones.
const FIRST_SWEEP: usize = 1024;

#[derive(Debug, Default)]
struct Pool {
    known: BTreeSet<ArcStr>,
    /// Number of names that were in use at the last sweep.
    used: usize,
}

impl Pool {
    fn intern(&mut self, text: &str) -> ArcStr {
        if let Some(name) = self.known.get(text) {
            return ArcStr::clone(name);
        }
        if self.known.len() >= FIRST_SWEEP.max(2 * self.used) {
            // A string without a reference count is static: it takes no memory.
            self.known.retain(|name| ArcStr::strong_count(name).is_some_and(|count| count > 1));
            self.used = self.known.len();
        }
        let name = ArcStr::from(text);
        self.known.insert(ArcStr::clone(&name));
        name
    }
}

impl Name {
    /// Returns the text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        // A thread that panicked while it held the lock has left a valid set of names.
        Self(NAMES.lock().unwrap_or_else(PoisonError::into_inner).intern(text))
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self::from(&*text)
    }
}

impl From<&String> for Name {
    fn from(text: &String) -> Self {
        Self::from(&**text)
    }
}

impl Default for Name {
    fn default() -> Self {
        Self::from("")
    }
}

impl Deref for Name {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl AsRef<str> for Name {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for Name {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl PartialEq<str> for Name {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl PartialEq<&str> for Name {
    fn eq(&self, other: &&str) -> bool {
        &*self.0 == *other
    }
}

impl PartialEq<String> for Name {
    fn eq(&self, other: &String) -> bool {
        *self.0 == **other
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

/// A set of names that is mostly empty: an empty one is no larger than a pointer.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Names(Option<Box<SortedSet<Name>>>);

impl Names {
    /// Whether the set is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether the set contains the name.
    pub fn contains(&self, name: &str) -> bool {
        self.0.as_ref().is_some_and(|names| names.contains(name))
    }

    /// Returns all names, in order.
    pub fn iter(&self) -> impl Iterator<Item = &Name> {
        self.0.iter().flat_map(|names| names.iter())
    }
}

impl<T: Into<Name>> FromIterator<T> for Names {
    fn from_iter<I: IntoIterator<Item = T>>(names: I) -> Self {
        let names: SortedSet<Name> = names.into_iter().map(Into::into).collect();
        Self((!names.is_empty()).then(|| Box::new(names)))
    }
}

macro_rules! names {
    ($(#[doc = $doc:literal] $name:ident;)+) => {$(
        #[doc = $doc]
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
        pub struct $name {
            /// Its namespace.
            pub namespace: Name,
            /// Its name in the namespace.
            pub name: Name,
        }

        impl $name {
            /// Returns a name of two parts.
            pub fn new(namespace: impl Into<Name>, name: impl Into<Name>) -> Self {
                Self { namespace: namespace.into(), name: name.into() }
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}/{}", self.namespace, self.name)
            }
        }
    )+};
}

names! {
    /// The name of a Service.
    ServiceName;
    /// The name of an EndpointSlice.
    SliceName;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_in_memory_once() {
        let (one, other) = (Name::from("name-in-memory-once"), Name::from("name-in-memory-once".to_owned()));
        assert!(ArcStr::ptr_eq(&one.0, &other.0));
        assert_eq!(size_of::<Option<Name>>(), size_of::<usize>());
        assert_eq!(one, other);
        assert_eq!(one, "name-in-memory-once");
    }

    #[test]
    fn unused_names_are_freed() {
        let mut names = Pool::default();
        let kept = names.intern("kept");
        for number in 0..10 * FIRST_SWEEP {
            names.intern(&number.to_string());
        }
        assert!(names.known.len() <= FIRST_SWEEP + 1, "{}", names.known.len());
        assert!(ArcStr::ptr_eq(&kept, &names.intern("kept")));
        let all: Vec<_> =
            (0..10 * FIRST_SWEEP).map(|number| names.intern(&format!("used {number}"))).collect();
        assert!(names.known.len() > all.len());
    }
}
