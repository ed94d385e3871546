use std::convert::Infallible;

use futures::stream;
use http::{Request, Response};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame};
use kube::Client;
use proptest::prelude::*;
use tower::service_fn;

use super::*;

const WATCH: &[u8] = include_bytes!("../protobuf/recorded/services.watch.pb");
const LINES: &[u8] = include_bytes!("../protobuf/recorded/services.watch.json");

/// Returns a body that arrives in these parts, and then ends or fails.
async fn body(parts: Vec<Vec<u8>>, end: Option<io::ErrorKind>) -> Body {
    let service = service_fn(move |_: Request<Body>| {
        let parts: Vec<_> = parts.iter().cloned().map(|part| Ok(Frame::data(Bytes::from(part)))).collect();
        let parts = stream::iter(parts.into_iter().chain(end.map(|kind| Err(io::Error::from(kind)))));
        async move { Ok::<_, Infallible>(Response::new(StreamBody::new(parts).boxed_unsync())) }
    });
    Client::new(service, "default").send(Request::new(Body::empty())).await.unwrap().into_body()
}

/// Returns all events, and the error if one ended them.
async fn all(form: Form, body: Body) -> (Vec<Vec<u8>>, Option<Error>) {
    let mut frames = Frames::new(form, body);
    let mut seen = Vec::new();
    loop {
        match frames.next().await {
            None => return (seen, None),
            Some(Ok(bytes)) => seen.push(bytes.to_vec()),
            Some(Err(error)) => {
                assert!(frames.next().await.is_none(), "nothing after an error");
                return (seen, Some(error));
            }
        }
    }
}

fn run<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

proptest! {
    #[test]
    fn events_are_the_same_however_they_are_cut(
        mut cuts in prop::collection::vec(0..WATCH.len(), 0..40), is_json in any::<bool>(),
    ) {
        let (form, bytes) = if is_json { (Form::Json, LINES) } else { (Form::Protobuf, WATCH) };
        cuts.sort_unstable();
        let (mut parts, mut from) = (Vec::new(), 0);
        for to in cuts.into_iter().chain([bytes.len()]) {
            parts.push(bytes[from..to].to_vec());
            from = to;
        }
        let seen = run(async { all(form, body(parts, None).await).await });
        let whole = run(async { all(form, body(vec![bytes.to_vec()], None).await).await });
        prop_assert_eq!(&seen.0, &whole.0);
        prop_assert!(seen.1.is_none() && seen.0.len() == 9, "{} events", seen.0.len());
    }

    #[test]
    fn decoder_of_frames_terminates_for_any_bytes(bytes in prop::collection::vec(any::<u8>(), 0..200), is_json in any::<bool>()) {
        let form = if is_json { Form::Json } else { Form::Protobuf };
        let (seen, _) = run(async { all(form, body(vec![bytes.clone()], None).await).await });
        prop_assert!(seen.iter().map(Vec::len).sum::<usize>() <= bytes.len());
    }
}

#[tokio::test]
async fn half_an_event_at_the_end_is_none() {
    for (form, bytes) in [(Form::Protobuf, WATCH), (Form::Json, LINES)] {
        let (seen, error) = all(form, body(vec![bytes[..bytes.len() - 1].to_vec()], None).await).await;
        assert_eq!((seen.len(), error.is_none()), (8, true), "{form:?}");
    }
}

#[tokio::test]
async fn a_connection_that_breaks_is_an_end_or_an_error() {
    let part = vec![WATCH.to_vec()];
    let (seen, error) =
        all(Form::Protobuf, body(part.clone(), Some(io::ErrorKind::UnexpectedEof)).await).await;
    assert_eq!((seen.len(), error.is_none()), (9, true), "watches end like that");
    let (seen, error) = all(Form::Protobuf, body(part, Some(io::ErrorKind::ConnectionReset)).await).await;
    assert!(seen.len() == 9 && error.is_some_and(|error| !is_malformed(&error)));
}

#[tokio::test]
async fn lengths_that_no_event_has_are_refused_before_they_are_read() {
    for length in [LONGEST as u32 + 1, u32::MAX] {
        let mut frames = Frames::new(Form::Protobuf, body(vec![length.to_be_bytes().to_vec()], None).await);
        let error = frames.next().await.unwrap().unwrap_err();
        assert!(is_malformed(&error) && error.to_string().contains(&length.to_string()), "{error}");
        assert_eq!(frames.buffer.capacity(), 0);
    }
    let parts = vec![vec![b'x'; 1 << 20]; 18];
    let (seen, error) = all(Form::Json, body(parts, None).await).await;
    assert!(seen.is_empty() && error.is_some_and(|error| is_malformed(&error)), "a line without end");
}

#[tokio::test]
async fn a_long_event_does_not_keep_its_memory() {
    let long = [&1_000_000_u32.to_be_bytes()[..], &vec![0; 1_000_000], WATCH].concat();
    let parts = long.chunks(16_384).map(<[u8]>::to_vec).collect();
    let mut frames = Frames::new(Form::Protobuf, body(parts, None).await);
    assert_eq!(frames.next().await.unwrap().unwrap().len(), 1_000_000);
    for _ in 0..9 {
        frames.next().await.unwrap().unwrap();
    }
    frames.add(b"x");
    assert!(frames.buffer.capacity() <= KEPT, "{}", frames.buffer.capacity());
}

#[test]
fn the_form_is_what_the_answer_says() {
    let of = |value: &'static str| {
        Form::of(&HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(value))]))
    };
    assert_eq!(of("application/vnd.kubernetes.protobuf;stream=watch"), Form::Protobuf);
    assert_eq!(of("Application/vnd.Kubernetes.protobuf"), Form::Protobuf);
    assert_eq!(of("application/json"), Form::Json);
    assert_eq!(Form::of(&HeaderMap::new()), Form::Json);
}
