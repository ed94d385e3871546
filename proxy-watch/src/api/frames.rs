//! Splits the body of a watch's answer into events: lines of JSON, or protobuf messages with a length prefix.

use std::error::Error as StdError;
use std::io::{self, BufRead as _};
use std::ops::Range;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue};
use http_body_util::BodyExt as _;
use kube::client::Body;
use kube::{Error, Result};
use tracing::debug;

use super::protobuf::wire::Malformed;

/// The longest event in bytes: client-go accepts no longer one, and etcd holds no object of more than 1.5 MB by default.
const LONGEST: usize = 16 << 20;
/// How many bytes of memory a buffer keeps after a long event.
const KEPT: usize = 64 << 10;

/// The encoding of the API server's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// Kubernetes' protobuf.
    Protobuf,
    /// JSON, and any other or missing content type.
    Json,
}

impl Form {
    /// Returns the form that the answer's content type states.
    pub fn of(headers: &HeaderMap<HeaderValue>) -> Self {
        let name = b"application/vnd.kubernetes.protobuf";
        let given = headers.get(CONTENT_TYPE).and_then(|value| value.as_bytes().get(..name.len()));
        if given.is_some_and(|given| given.eq_ignore_ascii_case(name)) { Self::Protobuf } else { Self::Json }
    }
}

/// Reads the events of an answer, one after the other.
pub struct Frames {
    form: Form,
    body: Option<Body>,
    buffer: Vec<u8>,
    /// How many bytes of the buffer have been handed out.
    taken: usize,
    /// How many bytes of the buffer have been handed out, or are known to hold no end of a line.
    searched: usize,
}

impl Frames {
    /// Creates a reader of this body.
    pub const fn new(form: Form, body: Body) -> Self {
        Self { form, body: Some(body), buffer: Vec::new(), taken: 0, searched: 0 }
    }

    /// Returns the form of the events.
    pub const fn form(&self) -> Form {
        self.form
    }

    /// Drops the body and the buffer: there are no more events.
    pub fn end(&mut self) {
        (self.body, self.buffer, self.taken, self.searched) = (None, Vec::new(), 0, 0);
    }

    /// Returns the next event, without its length prefix or the end of its line. `None`: the answer has ended, and the
    /// watch can be resumed. After an error, every call returns `None`.
    pub async fn next(&mut self) -> Option<Result<&[u8]>> {
        loop {
            match self.complete() {
                Ok(None) => {}
                Ok(Some(range)) if range.is_empty() && self.form == Form::Json => continue,
                Ok(Some(range)) => return Some(Ok(&self.buffer[range])),
                Err(error) => {
                    self.end();
                    return Some(Err(malformed(error)));
                }
            }
            match self.body.as_mut()?.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.add(&data);
                    }
                }
                Some(Err(error)) => {
                    self.end();
                    if is_cut_off(&error) {
                        debug!(%error, "a watch was cut off");
                        return None;
                    }
                    return Some(Err(Error::ReadEvents(io::Error::other(error))));
                }
                None => {
                    let left = self.buffer.len() - self.taken;
                    self.end();
                    if left > 0 {
                        debug!(bytes = left, "a watch ended within an event");
                    }
                    return None;
                }
            }
        }
    }

    fn add(&mut self, data: &[u8]) {
        self.buffer.drain(..self.taken);
        self.searched = self.searched.saturating_sub(self.taken);
        self.taken = 0;
        if self.buffer.capacity() > KEPT && self.buffer.len() + data.len() <= KEPT {
            self.buffer.shrink_to(KEPT);
        }
        self.buffer.extend_from_slice(data);
    }

    /// Takes the next complete event, and returns its position in the buffer; `None` if it has not arrived completely.
    fn complete(&mut self) -> Result<Option<Range<usize>>, Malformed> {
        let rest = &self.buffer[self.taken..];
        let range = match self.form {
            Form::Protobuf => {
                let Some((length, rest)) = rest.split_first_chunk() else { return Ok(None) };
                let length = u32::from_be_bytes(*length) as usize;
                if length > LONGEST {
                    return Err(Malformed::Length { length });
                }
                if rest.len() < length {
                    return Ok(None);
                }
                let start = self.taken + 4;
                self.taken = start + length;
                start..self.taken
            }
            Form::Json => {
                let from = self.searched.max(self.taken);
                let mut after = &self.buffer[from..];
                // Reading from a slice cannot fail.
                let found = from + after.skip_until(b'\n').unwrap_or_default();
                self.searched = found;
                if self.buffer[self.taken..found].last() != Some(&b'\n') {
                    let length = found - self.taken;
                    return if length > LONGEST { Err(Malformed::Length { length }) } else { Ok(None) };
                }
                let start = std::mem::replace(&mut self.taken, found);
                start..found - 1
            }
        };
        Ok(Some(range))
    }
}

/// Returns a decoding error as an error of kube-rs.
pub fn malformed(error: Malformed) -> Error {
    Error::ReadEvents(io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Whether an answer could not be decoded.
pub fn is_malformed(error: &Error) -> bool {
    match error {
        Error::SerdeError(_) => true,
        Error::ReadEvents(error) => error.kind() == io::ErrorKind::InvalidData,
        _ => false,
    }
}

/// Whether the connection ended within the body: so ends a watch that a server or a proxy closes.
fn is_cut_off(error: &Error) -> bool {
    let is_end = |error: &(dyn StdError + 'static)| {
        error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::UnexpectedEof)
    };
    let first: &(dyn StdError + 'static) = error;
    std::iter::successors(Some(first), |&error| error.source()).take(16).any(is_end)
        || error.to_string().contains("unexpected EOF during chunk")
}

#[cfg(test)]
mod tests;
