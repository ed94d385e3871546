//! Sends list and watch requests, in protobuf if the API server supports it: this is less work than JSON on both sides.
//!
//! The agent reads JSON if the server has no protobuf (406, 415, another content type) or if the protobuf cannot be
//! decoded. A server that refuses protobuf, or that sent protobuf which cannot be decoded, is not asked for it again.

use std::io;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::{Stream, stream};
use http::header::{ACCEPT, ACCEPT_ENCODING, RETRY_AFTER};
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use kube::api::{ListParams, ObjectList, VersionMatch, WatchParams};
use kube::client::Body;
use kube::core::response::StatusDetails;
use kube::core::{Status, WatchEvent};
use kube::{Api, Client, Error, Result};
use tokio::sync::watch;
use tokio::time::timeout;
use tracing::info;

use super::frames::{Form, Frames, is_malformed, malformed};
use super::kinds::Watched;
use super::protobuf::envelope::{self, List};
use proxy_core::model::Watches;

/// The `Accept` header of lists, which is that of kube-proxy.
const LISTS: &str = "application/vnd.kubernetes.protobuf, application/json";
/// The `Accept` header of watches.
const WATCHES: &str = "application/vnd.kubernetes.protobuf;stream=watch, application/json";
const JSON: &str = "application/json";
/// A list is dead if the server sends nothing for this time.
const STALLED: Duration = Duration::from_secs(90);

/// Requests objects of a kind. All clones share what the API server does not support.
pub struct Source<K> {
    client: Client,
    path: String,
    is_json: Arc<AtomicBool>,
    has_no_fields: Arc<AtomicBool>,
    watches: watch::Sender<Watches>,
    kind: PhantomData<fn() -> K>,
}

impl<K> Clone for Source<K> {
    fn clone(&self) -> Self {
        let Self { client, path, is_json, has_no_fields, watches, kind } = self;
        let (is_json, has_no_fields) = (Arc::clone(is_json), Arc::clone(has_no_fields));
        let (client, path, watches) = (client.clone(), path.clone(), watches.clone());
        Self { client, path, is_json, has_no_fields, watches, kind: *kind }
    }
}

impl<K: Watched> Source<K> {
    /// Creates a source of the objects of `api`.
    pub fn new(api: Api<K>) -> Self {
        let path = api.resource_url().to_owned();
        let (is_json, has_no_fields, watches) = Default::default();
        Self { client: api.into_client(), path, is_json, has_no_fields, watches, kind: PhantomData }
    }

    /// Reports to `watches` that the watch works.
    #[must_use]
    pub fn with_watches(self, watches: watch::Sender<Watches>) -> Self {
        Self { watches, ..self }
    }

    /// Reports that the watch works: it has sent what was requested, or has been open for a while without an error.
    pub fn works(&self) {
        watch_works(&self.watches, K::RESOURCE);
    }

    /// Whether requests should have the field selector of the kind.
    pub fn has_fields(&self) -> bool {
        !self.has_no_fields.load(Ordering::Relaxed)
    }

    /// Whether a request that failed in this way should be sent again without the field selector: the server may not know the
    /// field, and the agent does not need the selector. Later requests do not have it.
    pub fn drops_fields(&self, error: &Error) -> bool {
        let is_refused = matches!(error, Error::Api(status) if status.code == 400);
        if !is_refused || !K::FIELDS_ARE_OPTIONAL || self.has_no_fields.swap(true, Ordering::Relaxed) {
            return false;
        }
        let resource = K::RESOURCE;
        info!(resource, %error, "the API server refuses a field selector; requesting all objects");
        true
    }

    /// Lists the existing objects.
    pub async fn list(&self, params: &ListParams) -> Result<List<K>> {
        self.list_at(&self.path, params).await
    }

    /// Returns the object with this name, and the newest resourceVersion. A request without a resourceVersion is not
    /// answered from an old cache, and one with a namespace and a name reads one key of etcd. `at`: as it was at that version; 410 if
    /// the server no longer knows that.
    pub async fn find(&self, namespace: Option<&str>, name: &str, at: Option<u64>) -> Result<List<K>> {
        let params = ListParams {
            resource_version: at.map(|version| version.to_string()),
            version_match: at.map(|_| VersionMatch::Exact),
            ..ListParams::default().fields(&format!("metadata.name={name}")).limit(1)
        };
        self.list_at(&K::url_path(&(), namespace), &params).await
    }

    async fn list_at(&self, path: &str, params: &ListParams) -> Result<List<K>> {
        let request = kube::core::Request::new(path).list(params).map_err(Error::BuildRequest)?;
        let (form, answer) = self.send(&request, LISTS).await?;
        let mut body = answer.into_body();
        let mut bytes = Vec::new();
        while let Some(frame) = timeout(STALLED, body.frame()).await.unwrap_or(Some(Err(stalled()))) {
            if let Ok(data) = frame?.into_data() {
                bytes.extend_from_slice(&data);
            }
        }
        match form {
            Form::Protobuf => envelope::list(&bytes).map_err(|error| self.cannot_read(malformed(error))),
            Form::Json => {
                let ObjectList { metadata, items, .. } =
                    serde_json::from_slice(&bytes).map_err(Error::SerdeError)?;
                Ok(List { metadata, items })
            }
        }
    }

    /// Watches the changes of objects after `version`.
    pub async fn watch(
        &self,
        params: &WatchParams,
        version: &str,
    ) -> Result<impl Stream<Item = Result<WatchEvent<K>>> + Send + use<K>> {
        let mut request =
            kube::core::Request::new(&self.path).watch(params, version).map_err(Error::BuildRequest)?;
        // Servers from 1.37 on send each event as a separate gzip stream, of which tower-http decompresses only the first one.
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let (form, answer) = self.send(&request, WATCHES).await?;
        let state = (self.clone(), Frames::new(form, answer.into_body()));
        Ok(stream::unfold(state, |(source, mut frames)| async {
            let event = source.event(&mut frames).await?;
            Some((event, (source, frames)))
        }))
    }

    async fn event(&self, frames: &mut Frames) -> Option<Result<WatchEvent<K>>> {
        let form = frames.form();
        let event = match (frames.next().await?, form) {
            (Ok(bytes), Form::Protobuf) => envelope::event(bytes).map_err(malformed),
            (Ok(bytes), Form::Json) => serde_json::from_slice(bytes).map_err(|error| {
                // A failure may arrive as a `Status` without an event around it.
                // All of its fields are optional.
                let status = serde_json::from_slice::<Status>(bytes).ok().filter(|status| status.code != 0);
                status.map_or(Error::SerdeError(error), |status| Error::Api(Box::new(status)))
            }),
            (Err(error), _) => Err(error),
        };
        Some(event.map_err(|error| {
            if form == Form::Protobuf && is_malformed(&error) {
                frames.end();
                return self.cannot_read(error);
            }
            error
        }))
    }

    fn cannot_read(&self, error: Error) -> Error {
        self.use_json(&error.to_string());
        error
    }

    fn use_json(&self, why: &str) {
        if !self.is_json.swap(true, Ordering::Relaxed) {
            let resource = K::RESOURCE;
            info!(resource, why, "cannot use protobuf of the API server; requesting JSON");
        }
    }

    async fn send(&self, request: &Request<Vec<u8>>, accept: &'static str) -> Result<(Form, Response<Body>)> {
        loop {
            let is_json = self.is_json.load(Ordering::Relaxed);
            let mut request = request.clone().map(Body::from);
            let accept = HeaderValue::from_static(if is_json { JSON } else { accept });
            request.headers_mut().insert(ACCEPT, accept);
            let answer = self.client.send(request).await?;
            let (status, form) = (answer.status(), Form::of(answer.headers()));
            if !is_json && matches!(status, StatusCode::NOT_ACCEPTABLE | StatusCode::UNSUPPORTED_MEDIA_TYPE) {
                self.use_json(&format!("answered with {status}"));
                continue;
            }
            if !status.is_client_error() && !status.is_server_error() {
                return Ok((form, answer));
            }
            let wait = answer.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.parse().ok());
            let bytes = answer.into_body().collect().await?.to_bytes();
            let error_status = match form {
                Form::Protobuf => envelope::status(&bytes).ok(),
                Form::Json => serde_json::from_slice(&bytes).ok(),
            };
            let mut error_status = error_status.unwrap_or_else(|| {
                let text = String::from_utf8_lossy(&bytes);
                Status::failure(text.trim(), "Failed to parse error data").with_code(status.as_u16())
            });
            if error_status.code == 0 {
                // The error of a gateway, in JSON of its own.
                error_status.code = status.as_u16();
            }
            if let Some(seconds) = wait {
                error_status.details.get_or_insert_with(no_details).retry_after_seconds = seconds;
            }
            return Err(Error::Api(Box::new(error_status)));
        }
    }
}

/// Records that the watch of `resource` works.
pub fn watch_works(watches: &watch::Sender<Watches>, resource: &'static str) {
    watches.send_if_modified(|watches| watches.insert(resource, None) != Some(None));
}

const fn no_details() -> StatusDetails {
    StatusDetails {
        name: String::new(),
        group: String::new(),
        kind: String::new(),
        uid: String::new(),
        causes: Vec::new(),
        retry_after_seconds: 0,
    }
}

fn stalled() -> Error {
    Error::ReadEvents(io::Error::new(io::ErrorKind::TimedOut, "the API server stopped within a list"))
}

#[cfg(test)]
mod tests;
