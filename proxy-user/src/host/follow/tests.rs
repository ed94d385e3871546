use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::route::{RouteHeader, RouteMessage};
use rtnetlink::packet_route::tc::TcMessage;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;

const SOON: Duration = Duration::from_secs(30);

#[test]
fn a_route_that_flaps_is_no_reason_to_look_again() {
    let change = |table, destination_prefix_length| {
        let header = RouteHeader { table, destination_prefix_length, ..RouteHeader::default() };
        let mut route = RouteMessage::default();
        route.header = header;
        [RouteNetlinkMessage::NewRoute(route.clone()), RouteNetlinkMessage::DelRoute(route)]
            .map(|message| matters(&NetlinkMessage::from(message)))
    };
    assert_eq!(change(RouteHeader::RT_TABLE_MAIN, 24), [false; 2]);
    assert_eq!(change(255, 0), [false; 2]);
    assert_eq!(change(RouteHeader::RT_TABLE_MAIN, 0), [true; 2]);
    let mut local = RouteMessage::default();
    (local.header.table, local.header.kind) = (255, rtnetlink::packet_route::route::RouteType::Local);
    assert!(matters(&NetlinkMessage::from(RouteNetlinkMessage::NewRoute(local))));
    let address = RouteNetlinkMessage::NewAddress(AddressMessage::default());
    assert!(matters(&NetlinkMessage::from(address)));
}

#[test]
fn a_removed_filter_is_a_reason_to_look_again_and_an_added_one_is_not() {
    let filter = TcMessage::with_index(2);
    let mut clsact = TcMessage::with_index(2);
    clsact.attributes.push(TcAttribute::Kind("clsact".to_owned()));
    let mut queue = TcMessage::with_index(2);
    queue.attributes.push(TcAttribute::Kind("fq_codel".to_owned()));
    for (message, expected) in [
        (RouteNetlinkMessage::DelTrafficFilter(filter.clone()), true),
        (RouteNetlinkMessage::NewTrafficFilter(filter), false),
        (RouteNetlinkMessage::DelQueueDiscipline(clsact.clone()), true),
        (RouteNetlinkMessage::NewQueueDiscipline(clsact), false),
        (RouteNetlinkMessage::DelQueueDiscipline(queue), false),
    ] {
        assert_eq!(matters(&NetlinkMessage::from(message.clone())), expected, "{message:?}");
    }
}

#[test]
fn removals_of_a_burst_are_collected() {
    let removed = |last| {
        let mut address = AddressMessage::default();
        (address.header.index, address.header.prefix_len) = (3, 32);
        address.attributes = vec![AddressAttribute::Local([10, 0, 0, last].into())];
        RouteNetlinkMessage::DelAddress(address)
    };
    let left = |interface_family| {
        let mut link = LinkMessage::default();
        (link.header.index, link.header.interface_family) = (7, interface_family);
        RouteNetlinkMessage::DelLink(link)
    };
    let mut gone = Gone::default();
    for message in [removed(1), removed(2), left(AddressFamily::Bridge)] {
        gone.note(&NetlinkMessage::from(message));
    }
    assert_eq!(gone.addresses, BTreeSet::from([1, 2].map(|last| (3, [10, 0, 0, last].into()))));
    assert!(gone.devices.is_empty(), "it has only left its bridge");
    gone.note(&NetlinkMessage::from(left(AddressFamily::Unspec)));
    assert_eq!(gone.devices, BTreeSet::from([7]));
}

#[tokio::test]
async fn what_was_seen_already_is_not_sent_again() {
    let follower = Follower::start(HostFacts::default()).unwrap();
    let mut last = follower.view().clone();
    let (mut devices, due) = (follower.devices(), follower.due());
    follower.note(Some(&io::ErrorKind::ConnectionAborted.into()));
    let mut problems = follower.problems();
    let (sender, mut events) = mpsc::channel(1);
    let task = tokio::spawn(follower.run(sender));
    // The start of the subscription publishes one list.
    timeout(SOON, devices.changed()).await.unwrap().unwrap();
    assert!(devices.borrow().iter().any(|device| device.name == "lo"));
    // The state of the test machine does not change during the next moments, or each change is sent once.
    while let Ok(Some(event)) = timeout(Duration::from_millis(200), events.recv()).await {
        let Event::Host(view) = event else { panic!("{event:?}") };
        assert_ne!(view, last);
        last = view;
    }
    timeout(SOON, problems.wait_for(Vec::is_empty)).await.unwrap().unwrap();
    assert!(due.borrow().unwrap() > Instant::now(), "the next read is due");
    drop(events);
    timeout(SOON, task).await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn machine_that_cannot_be_read_is_a_problem_and_no_progress() {
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};
    let follower = Follower::start(HostFacts::default()).unwrap();
    let (due, problems) = (follower.due(), follower.problems());
    assert_eq!(*due.borrow(), None, "nothing is expected before the start");
    let (sender, _events) = mpsc::channel(1);
    // This thread gets no socket.
    let (allow, fail) = (SeccompAction::Allow, SeccompAction::Errno(libc::EMFILE as u32));
    let calls = [(libc::SYS_socket, Vec::new())].into();
    let filter = SeccompFilter::new(calls, allow, fail, std::env::consts::ARCH.try_into().unwrap()).unwrap();
    seccompiler::apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
    let task = tokio::spawn(follower.run(sender));
    sleep(Duration::from_mins(2)).await;
    assert!(due.borrow().unwrap().elapsed() >= Duration::from_mins(2));
    assert!(problems.borrow().join("").ends_with("Too many open files (os error 24)"), "{problems:?}");
    task.abort();
}

#[tokio::test]
async fn what_differs_is_sent_although_the_receiver_is_slow() {
    let mut follower = Follower::start(HostFacts::default()).unwrap();
    let seen = follower.view().clone();
    follower.known = HostView::default();
    let mut devices = follower.devices();
    let (sender, mut events) = mpsc::channel(1);
    sender.send(Event::Host(HostView::default())).await.unwrap();
    let _task = tokio::spawn(follower.run(sender));
    timeout(SOON, devices.changed()).await.unwrap().unwrap();
    events.recv().await.unwrap();
    let Some(Event::Host(sent)) = timeout(SOON, events.recv()).await.unwrap() else { panic!("no view") };
    assert_eq!((sent.netns_cookie, sent.devices.len()), (seen.netns_cookie, seen.devices.len()));
}

#[test]
fn slow_read_is_followed_by_a_rest_without_a_wake_and_without_a_loss() {
    let start = Instant::now();
    let mut schedule = Schedule::new(start);
    let at = |seconds| start + Duration::from_secs(seconds);
    assert_eq!(schedule.begin(at(0)), Some(FactsToRead::ALL));
    schedule.end(at(20), true);
    // A default route changes during the rest.
    schedule.due.get_or_insert_default().routes = true;
    assert_eq!(schedule.begin(at(21)), None);
    assert_eq!(schedule.next(), at(100), "although the periods of 1 s and 10 s are over");
    assert_eq!(schedule.begin(at(100)), Some(FactsToRead { routes: true, ..FactsToRead::default() }));
    schedule.end(at(101), false);
    assert_eq!(schedule.next(), at(10), "what causes no notification is read again");
    schedule.period_is_over(at(101));
    assert_eq!(schedule.begin(at(104)), None);
    assert_eq!(schedule.begin(at(105)), Some(FactsToRead { unnotified: true, ..FactsToRead::default() }));
}
