//! Kubernetes' envelope around an object in protobuf (`runtime.Unknown` behind four bytes), lists, and watch events
//! (`meta/v1` `WatchEvent`, which do not begin with these four bytes).

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ListMeta, ObjectMeta};
use kube::Resource;
use kube::core::watch::{Bookmark, BookmarkMeta};
use kube::core::{Status, TypeMeta, WatchEvent};

use super::messages::Failure;
use super::wire::{Field, Malformed, Message, first, read};

/// The first bytes of every object.
const MAGIC: &[u8] = b"k8s\0";

/// A list of objects of one kind, or a page of it.
#[derive(Debug)]
pub struct List<K> {
    /// The list's resourceVersion, and the continue token of the next page.
    pub metadata: ListMeta,
    /// The objects.
    pub items: Vec<K>,
}

impl<K> Default for List<K> {
    fn default() -> Self {
        Self { metadata: ListMeta::default(), items: Vec::new() }
    }
}

impl<K: Message> Message for List<K> {
    fn set(&mut self, field: &Field<'_>) -> Result<(), Malformed> {
        match field.number {
            1 => self.metadata = field.message()?,
            2 => self.items.push(field.message()?),
            _ => {}
        }
        Ok(())
    }
}

/// An object of any kind. Only its metadata are decoded, which are the first field of every kind.
#[derive(Default)]
struct AnyObject(ObjectMeta);

impl Message for AnyObject {
    fn set(&mut self, field: &Field<'_>) -> Result<(), Malformed> {
        if field.number == 1 {
            self.0 = field.message()?;
        }
        Ok(())
    }
}

/// Decodes a list of objects.
pub fn list<K: Message + Resource<DynamicType = ()>>(bytes: &[u8]) -> Result<List<K>, Malformed> {
    read(open(bytes, &format!("{}List", K::kind(&())))?)
}

/// Decodes the `Status` that describes a failure.
pub fn status(bytes: &[u8]) -> Result<Status, Malformed> {
    read::<Failure>(open(bytes, "Status")?).map(|Failure(status)| status)
}

/// Decodes a watch event, without its length prefix.
pub fn event<K: Message + Resource<DynamicType = ()>>(bytes: &[u8]) -> Result<WatchEvent<K>, Malformed> {
    let (mut name, mut object, mut rest) = ("", &[][..], bytes);
    while !rest.is_empty() {
        let field = first(&mut rest)?;
        match field.number {
            1 => name = field.text()?,
            // A RawExtension.
            2 => object = find(field.bytes()?, 1)?.map_or(Ok(&[][..]), |raw| raw.bytes())?,
            _ => {}
        }
    }
    let kind: Cow<'_, str> = K::kind(&());
    let opened = || open(object, &kind);
    Ok(match name {
        "ADDED" => WatchEvent::Added(read(opened()?)?),
        "MODIFIED" => WatchEvent::Modified(read(opened()?)?),
        "DELETED" => WatchEvent::Deleted(read(opened()?)?),
        "BOOKMARK" => {
            let AnyObject(metadata) = read(opened()?)?;
            let ObjectMeta { resource_version, annotations, .. } = metadata;
            WatchEvent::Bookmark(Bookmark {
                types: TypeMeta::resource::<K>(),
                metadata: BookmarkMeta {
                    resource_version: resource_version.unwrap_or_default(),
                    annotations: annotations.unwrap_or_default(),
                },
            })
        }
        "ERROR" => WatchEvent::Error(Box::new(status(object)?)),
        _ => return Err(Malformed::Event { name: name.to_owned() }),
    })
}

/// Returns the content of an envelope; an error if its object is not of the kind `wanted`.
fn open<'a>(bytes: &'a [u8], wanted: &str) -> Result<&'a [u8], Malformed> {
    let (mut found, mut raw, mut rest) = ("", &[][..], bytes.strip_prefix(MAGIC).ok_or(Malformed::Magic)?);
    while !rest.is_empty() {
        let field = first(&mut rest)?;
        match field.number {
            // A TypeMeta.
            1 => found = find(field.bytes()?, 2)?.map_or(Ok(""), |kind| kind.text())?,
            2 => raw = field.bytes()?,
            // The content encoding and the content type: both are empty for plain protobuf.
            3 | 4 if !field.bytes()?.is_empty() => {
                return Err(Malformed::Kind { wanted: wanted.to_owned(), found: field.text()?.to_owned() });
            }
            _ => {}
        }
    }
    if found == wanted {
        return Ok(raw);
    }
    Err(Malformed::Kind { wanted: wanted.to_owned(), found: found.to_owned() })
}

/// Returns the last field with this number.
fn find(bytes: &[u8], number: u32) -> Result<Option<Field<'_>>, Malformed> {
    let (mut found, mut rest) = (None, bytes);
    while !rest.is_empty() {
        let field = first(&mut rest)?;
        if field.number == number {
            found = Some(field);
        }
    }
    Ok(found)
}
