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
#[case(Error::WatchError(status(410)), Trouble::Expired)]
#[case(Error::WatchStartFailed(kube::Error::Api(status(410))), Trouble::Expired)]
#[case(Error::InitialListFailed(kube::Error::Api(status(403))), Trouble::Forbidden)]
#[case(Error::InitialListFailed(kube::Error::Api(status(401))), Trouble::Forbidden)]
#[case(Error::InitialListFailed(kube::Error::Api(status(503))), Trouble::Away)]
#[case(Error::WatchError(status(500)), Trouble::Interrupted)]
#[case(Error::WatchFailed(kube::Error::Service("reset".into())), Trouble::Interrupted)]
#[case(away(), Trouble::Away)]
#[case(Error::NoResourceVersion, Trouble::Away)]
fn errors_are_told_apart(#[case] error: Error, #[case] expected: Trouble) {
    assert_eq!(Trouble::of(&error), expected);
}

#[test]
fn an_outage_is_warned_of_once() {
    let mut outage = Outage::default();
    assert!(!outage.failed("services", &Error::WatchError(status(500))), "an interruption is no outage");
    assert!(!outage.is_away());
    assert!(outage.failed("services", &away()));
    assert!(!outage.failed("services", &away()));
    assert!(!outage.failed("nodes", &away()), "it is the same server");
    assert!(outage.is_away());
    outage.is_over(Some("nodes"));
    assert!(!outage.is_away());
    assert!(outage.failed("services", &away()), "another outage");
}

#[test]
fn a_refusal_is_warned_of_once_for_each_resource() {
    let forbidden = || Error::InitialListFailed(kube::Error::Api(status(403)));
    let mut outage = Outage::default();
    assert!(outage.failed("services", &forbidden()));
    assert!(!outage.failed("services", &forbidden()));
    assert!(outage.failed("nodes", &forbidden()));
    outage.is_over(Some("services"));
    assert!(outage.failed("services", &forbidden()));
    assert!(!outage.failed("nodes", &forbidden()));
}

#[test]
fn causes_are_told_once() {
    let io = std::io::Error::other("the cable");
    let error = Error::WatchStartFailed(kube::Error::Service(Box::new(io)));
    let text = chain(&error);
    assert_eq!(text.matches("the cable").count(), 1, "{text}");
}
