//! Which edition of an object is known.

/// What the API server calls an edition of an object; empty where an object comes from a folder.
///
/// Two objects with the same content are equal whichever edition they are: every value of this type equals every other one, and
/// [`Version::is`] compares. An edition that says the same needs no new plan, but what is in force is then the newer one.
#[derive(Clone, Debug, Default)]
pub struct Version {
    /// `metadata.uid`.
    pub uid: Box<str>,
    /// `metadata.resourceVersion`.
    pub resource_version: Box<str>,
    /// `metadata.generation`, for kinds that have one.
    pub generation: Option<i64>,
}

impl Version {
    /// Whether it is this edition.
    pub fn is(&self, other: &Self) -> bool {
        let Self { uid, resource_version, generation } = self;
        (uid, resource_version, generation) == (&other.uid, &other.resource_version, &other.generation)
    }
}

impl PartialEq for Version {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Version {}
