use kube::core::Status;
use rstest::rstest;

use super::*;

fn status(code: u16) -> Box<Status> {
    Box::new(Status { code, ..Status::default() })
}

fn away() -> Error {
    Error::WatchStartFailed(kube::Error::Service("connection refused".into()))
}

#[rstest]
#[case(Error::WatchError(status(410)), WatchErrorKind::Expired)]
#[case(Error::WatchStartFailed(kube::Error::Api(status(410))), WatchErrorKind::Expired)]
#[case(Error::InitialListFailed(kube::Error::Api(status(403))), WatchErrorKind::Forbidden)]
#[case(Error::InitialListFailed(kube::Error::Api(status(401))), WatchErrorKind::Unauthorized)]
#[case(Error::InitialListFailed(kube::Error::Api(status(503))), WatchErrorKind::Away)]
#[case(Error::InitialListFailed(kube::Error::Api(status(429))), WatchErrorKind::Refused)]
#[case(Error::WatchStartFailed(kube::Error::Api(status(429))), WatchErrorKind::Refused)]
#[case(Error::WatchError(status(429)), WatchErrorKind::Refused)]
#[case(Error::WatchStartFailed(kube::Error::Api(status(400))), WatchErrorKind::Refused)]
#[case(Error::WatchError(status(400)), WatchErrorKind::Ended)]
#[case(Error::WatchError(status(500)), WatchErrorKind::Ended)]
#[case(Error::WatchFailed(kube::Error::Api(status(500))), WatchErrorKind::Ended)]
#[case(Error::WatchFailed(kube::Error::Service("reset".into())), WatchErrorKind::Interrupted)]
#[case(away(), WatchErrorKind::Away)]
#[case(Error::NoResourceVersion, WatchErrorKind::Away)]
fn watch_errors_are_classified(#[case] error: Error, #[case] expected: WatchErrorKind) {
    assert_eq!(WatchErrorKind::of(&error), expected);
}

fn forbidden() -> Error {
    Error::InitialListFailed(kube::Error::Api(status(403)))
}

#[test]
fn an_outage_is_warned_of_once() {
    let (mut outage, now) = (WatchHealth::default(), Instant::now());
    assert!(!outage.failed("services", &Error::WatchError(status(500)), now), "an interruption is no outage");
    assert!(!outage.is_away());
    assert!(outage.failed("services", &away(), now));
    assert!(!outage.failed("services", &away(), now));
    assert!(!outage.failed("nodes", &away(), now), "it is the same server");
    assert!(outage.is_away());
    outage.recovered(Some("nodes"));
    assert!(!outage.is_away());
    assert!(outage.failed("services", &away(), now), "another outage");
}

#[test]
fn a_refusal_that_lasts_is_warned_of_once_for_each_resource() {
    let (mut outage, begin) = (WatchHealth::default(), Instant::now());
    let mut refused =
        |resource, seconds| outage.failed(resource, &forbidden(), begin + Duration::from_secs(seconds));
    assert!(!refused("services", 0), "it may not last");
    assert!(!refused("services", 4));
    assert!(!refused("nodes", 4));
    assert!(refused("services", 5));
    assert!(!refused("services", 100), "that was said");
    assert!(refused("nodes", 100));
}

#[test]
fn lasting_429_is_a_refusal() {
    let (mut outage, begin) = (WatchHealth::default(), Instant::now());
    let error = Error::InitialListFailed(kube::Error::Api(status(429)));
    let mut refused = |seconds| outage.failed("services", &error, begin + Duration::from_secs(seconds));
    assert_eq!([refused(0), refused(5), refused(6)], [false, true, false]);
    assert!(!outage.is_away(), "it answers");
}

#[test]
fn error_events_that_last_are_warned_of_once() {
    let (mut outage, begin) = (WatchHealth::default(), Instant::now());
    let mut ended = |seconds| {
        outage.failed("services", &Error::WatchError(status(500)), begin + Duration::from_secs(seconds))
    };
    assert_eq!([ended(0), ended(4), ended(5), ended(6)], [false, false, true, false]);
}

#[test]
fn a_success_begins_a_refusal_anew_for_its_resource_only() {
    let (mut outage, begin) = (WatchHealth::default(), Instant::now());
    let at = |seconds| begin + Duration::from_secs(seconds);
    assert!(!outage.failed("services", &forbidden(), at(0)));
    assert!(!outage.failed("nodes", &forbidden(), at(0)));
    outage.recovered(Some("services"));
    assert!(!outage.failed("services", &forbidden(), at(30)), "the first since it worked");
    assert!(outage.failed("nodes", &forbidden(), at(30)));
    assert!(outage.failed("services", &forbidden(), at(35)));
    outage.recovered(Some("services"));
    assert!(!outage.failed("services", &forbidden(), at(36)));
}

#[test]
fn an_outage_between_two_refusals_does_not_hide_that_they_last() {
    let (mut outage, begin) = (WatchHealth::default(), Instant::now());
    let at = |seconds| begin + Duration::from_secs(seconds);
    assert!(!outage.failed("services", &forbidden(), at(0)));
    assert!(outage.failed("services", &away(), at(1)));
    outage.recovered(None);
    assert!(outage.failed("services", &forbidden(), at(30)));
}

#[test]
fn cause_of_an_error_is_printed_once() {
    let io = std::io::Error::other("the cable");
    let error = Error::WatchStartFailed(kube::Error::Service(Box::new(io)));
    let text = chain(&error);
    assert_eq!(text.matches("the cable").count(), 1, "{text}");
}

#[test]
fn names_of_the_client_library_are_not_in_the_text() {
    let text = chain(&forbidden());
    assert!(!text.is_empty() && !text.contains("ApiError") && !text.contains("Status {"), "{text}");
}

#[test]
fn cause_that_the_error_contains_is_not_repeated() {
    #[derive(Debug, thiserror::Error)]
    #[error("outer")]
    struct Outer(#[source] std::io::Error);

    assert_eq!(chain(&Outer(std::io::Error::other("inner"))), "outer: inner");
    assert_eq!(chain(&Outer(std::io::Error::other("outer"))), "outer");
}

#[test]
fn late_lists_are_warned_of_once_until_all_are_complete() {
    let mut outage = WatchHealth::default();
    assert!(outage.late("services"));
    assert!(!outage.late("services"));
    assert!(!outage.late("nodes"), "it is the same server");
    outage.recovered(Some("services"));
    assert!(!outage.late("services"), "the other one is still late");
    outage.recovered(None);
    outage.recovered(Some("services"));
    outage.recovered(Some("nodes"));
    assert!(outage.late("services"), "another outage");
}

#[test]
fn a_late_list_of_a_server_that_is_away_is_not_warned_of_again() {
    let mut outage = WatchHealth::default();
    assert!(outage.failed("services", &away(), Instant::now()));
    assert!(!outage.late("services"));
}
