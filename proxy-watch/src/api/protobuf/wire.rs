//! The wire format of protobuf, as far as Kubernetes objects need it. It is read without copies, and unused fields are
//! skipped. Rules: <https://protobuf.dev/programming-guides/encoding/>.

use thiserror::Error;

/// Why bytes cannot be decoded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Malformed {
    /// A field is longer than its message.
    #[error("a field exceeds the end of its message")]
    Cut,
    /// A number does not fit into 64 bits.
    #[error("a number is longer than 10 bytes")]
    Number,
    /// A field's number or its wire type is not valid.
    #[error("{tag} is not the tag of a field")]
    Tag {
        /// The tag that was read.
        tag: u64,
    },
    /// A field that is read does not have the wire type of Kubernetes' definition.
    #[error("field {field} does not have the type that Kubernetes defines")]
    Type {
        /// The field's number.
        field: u32,
    },
    /// A string is not valid UTF-8.
    #[error("field {field} is not UTF-8")]
    Text {
        /// The field's number.
        field: u32,
    },
    /// The bytes are not a Kubernetes object.
    #[error("an object does not start with `k8s` and a zero byte")]
    Magic,
    /// The object is of another kind, or in another encoding.
    #[error("got a `{found}` instead of a `{wanted}`")]
    Kind {
        /// The requested kind.
        wanted: String,
        /// The received kind or encoding.
        found: String,
    },
    /// The type of a watch event is unknown.
    #[error("`{name}` is not a type of event")]
    Event {
        /// The type of the event.
        name: String,
    },
    /// A frame or a line of a watch is too long for an object.
    #[error("an event has at least {length} bytes, which is too long")]
    Length {
        /// The length in bytes.
        length: usize,
    },
}

/// A message that is decoded field by field. A field that occurs again replaces the previous value or adds to it,
/// depending on its type.
pub trait Message: Default {
    /// Decodes one field; ignores fields that are not read.
    fn set(&mut self, field: &Field<'_>) -> Result<(), Malformed>;
}

/// One field of a message.
#[derive(Clone, Copy, Debug)]
pub struct Field<'a> {
    /// The field's number.
    pub number: u32,
    value: Value<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Value<'a> {
    Number(u64),
    Bytes(&'a [u8]),
    /// Four or eight bytes; no field that is read has such a type.
    Fixed,
}

impl<'a> Field<'a> {
    /// Returns the bytes of a string or a message.
    pub fn bytes(&self) -> Result<&'a [u8], Malformed> {
        match self.value {
            Value::Bytes(bytes) => Ok(bytes),
            Value::Number(_) | Value::Fixed => Err(Malformed::Type { field: self.number }),
        }
    }

    /// Returns a string.
    pub fn text(&self) -> Result<&'a str, Malformed> {
        str::from_utf8(self.bytes()?).map_err(|_| Malformed::Text { field: self.number })
    }

    /// Returns a string; `None` if it is empty, since JSON omits it then.
    pub fn filled(&self) -> Result<Option<String>, Malformed> {
        let text = self.text()?;
        Ok((!text.is_empty()).then(|| text.to_owned()))
    }

    /// Returns an `int64`.
    pub fn long(&self) -> Result<i64, Malformed> {
        match self.value {
            Value::Number(number) => Ok(number.cast_signed()),
            Value::Bytes(_) | Value::Fixed => Err(Malformed::Type { field: self.number }),
        }
    }

    /// Returns an `int32`: the lower half of a longer number, as protobuf's rules say.
    pub fn int(&self) -> Result<i32, Malformed> {
        Ok(self.long()? as i32)
    }

    /// Returns a `bool`.
    pub fn flag(&self) -> Result<bool, Malformed> {
        Ok(self.long()? != 0)
    }

    /// Decodes a message.
    pub fn message<M: Message>(&self) -> Result<M, Malformed> {
        read(self.bytes()?)
    }
}

/// Decodes a whole message.
pub fn read<M: Message>(bytes: &[u8]) -> Result<M, Malformed> {
    let (mut message, mut rest) = (M::default(), bytes);
    while !rest.is_empty() {
        message.set(&first(&mut rest)?)?;
    }
    Ok(message)
}

/// Takes the first field of `rest`, which is not empty.
pub fn first<'a>(rest: &mut &'a [u8]) -> Result<Field<'a>, Malformed> {
    let tag = number(rest)?;
    let bad = Malformed::Tag { tag };
    let number_of_field = u32::try_from(tag >> 3).ok().filter(|number| (1..1 << 29).contains(number));
    let Some(field) = number_of_field else { return Err(bad) };
    let value = match tag & 7 {
        0 => Value::Number(number(rest)?),
        1 => take(rest, 8).map(|_| Value::Fixed)?,
        2 => {
            let length = usize::try_from(number(rest)?).map_err(|_| Malformed::Cut)?;
            Value::Bytes(take(rest, length)?)
        }
        5 => take(rest, 4).map(|_| Value::Fixed)?,
        // Groups, which Kubernetes does not use.
        _ => return Err(bad),
    };
    Ok(Field { number: field, value })
}

fn take<'a>(rest: &mut &'a [u8], length: usize) -> Result<&'a [u8], Malformed> {
    rest.split_off(..length).ok_or(Malformed::Cut)
}

fn number(rest: &mut &[u8]) -> Result<u64, Malformed> {
    let mut number = 0;
    for at in 0..10 {
        let byte = *rest.split_off_first().ok_or(Malformed::Cut)?;
        number |= u64::from(byte & 0x7f) << (7 * at);
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(Malformed::Number)
}
