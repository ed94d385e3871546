use proptest::prelude::*;

use super::*;
use crate::env::Health as _;
use crate::shared::Shared as _;

/// One backoff of a SYN, and the tick in which it is sent.
const BACKOFF: u32 = HZ + 1;

fn algorithm() -> impl Strategy<Value = Algorithm> {
    prop::sample::select(std::vec![Algorithm::Random, Algorithm::RoundRobin, Algorithm::LeastConnections])
}

/// Algorithms that do not depend on other connections.
fn by_hash() -> impl Strategy<Value = Algorithm> {
    prop::sample::select(std::vec![Algorithm::Random, Algorithm::Maglev])
}

fn world() -> impl Strategy<Value = (u32, Algorithm, bool)> {
    (2..=8u32, algorithm(), any::<bool>())
}

/// Lets clients connect until each endpoint has answered.
fn warm_up(world: &mut World) {
    let mut missing: Vec<u32> = world.endpoints.keys().copied().collect();
    for client in (100..160).cycle().take(1_000) {
        if missing.is_empty() {
            break;
        }
        let End::Connected(id) = world.outcome(client).end else { panic!("all endpoints accept") };
        missing.retain(|other| *other != id);
        world.pass(HZ / 50);
    }
    assert!(missing.is_empty(), "{missing:?}");
    world.finish();
}

fn simulate(cases: u32) -> ProptestConfig {
    ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) }
}

proptest! {
    #![proptest_config(simulate(48))]

    /// `all-refuse`: a Service whose endpoints all refuse is refused to each client at once, or after one retransmission.
    #[test]
    fn all_refuse(
        (count, algorithm, are_local) in world(),
        is_warm: bool,
        affinity in prop::sample::select(std::vec![0, 600]),
        pauses in prop::collection::vec(0..5 * HZ, 1..40),
        clients in prop::collection::vec(1..20u8, 40),
    ) {
        let mut world = World::new(count, algorithm, are_local, affinity);
        if is_warm {
            warm_up(&mut world);
        }
        world.set_all(Mode::Refuses);
        for (pause, client) in pauses.iter().zip(clients) {
            world.connect(client);
            world.pass(*pause);
        }
        for done in world.finish() {
            prop_assert!(matches!(done.end, End::Refused(_)), "{done:?}");
            prop_assert!(done.took <= if is_warm { BACKOFF } else { 0 }, "{done:?}");
            prop_assert!(done.hidden <= 1 && done.tried.len() <= 2, "{done:?}");
        }
    }

    /// `one-works`: where one endpoint has answered lately and the others have refused since they last answered, each client
    /// is served after one retransmission at most. An endpoint that begins to refuse may cost one client its connection.
    #[test]
    fn one_works(
        (count, algorithm, are_local) in world(),
        good in 1..=8u32,
        changes in prop::collection::vec((0..HZ, 1..20u8, 1..=8u32, any::<bool>()), 1..28),
    ) {
        let good = (good - 1) % count + 1;
        let mut world = World::new(count, algorithm, are_local, 0);
        warm_up(&mut world);
        world.set_all(Mode::Refuses);
        world.endpoints.insert(good, Mode::Accepts);
        // Endpoints that have answered, and refuse now.
        let mut stale: std::collections::BTreeSet<u32> = (1..=count).filter(|id| *id != good).collect();
        for (pause, client, other, accepts) in changes {
            // The others flap.
            if other <= count && other != good {
                world.endpoints.insert(other, if accepts { Mode::Accepts } else { Mode::Refuses });
            }
            let done = world.outcome(client);
            match done.end {
                End::Refused(id) => prop_assert!(stale.remove(&id) && done.hidden == 1, "{done:?}"),
                End::Connected(id) if id != good => _ = stale.insert(id),
                End::Connected(_) => {}
                End::TimedOut => prop_assert!(false, "{done:?}"),
            }
            if let [first, _] = done.tried[..] {
                stale.remove(&first);
            }
            prop_assert!(done.took <= BACKOFF && done.hidden <= 1, "{done:?}");
            world.pass(pause);
        }
    }

    /// `own-failures`: what one client's policy drops changes nothing for another client.
    #[test]
    fn own_failures(
        (count, algorithm, are_local) in (2..=8u32, by_hash(), any::<bool>()),
        affinity in prop::sample::select(std::vec![0, 600]),
        events in prop::collection::vec((0..2 * HZ, 1..8u8, 1..=8u32, 0..6u8), 1..60),
    ) {
        const DENIED: [u8; 3] = [50, 51, 52];
        let run = |has_denied: bool| {
            let mut world = World::new(count, algorithm, are_local, affinity);
            let all: Vec<_> = world.endpoints.keys().copied().collect();
            world.dropped = DENIED.iter().flat_map(|client| all.iter().map(move |id| (*client, *id))).collect();
            let collides = world.has_collision((1..8).chain(DENIED));
            for (pause, client, endpoint, change) in &events {
                if let Some(mode) = world.endpoints.get_mut(endpoint) {
                    match change {
                        0 => *mode = Mode::Refuses,
                        1 => *mode = Mode::IsSilent,
                        2 | 3 => *mode = Mode::Accepts,
                        _ => {}
                    }
                }
                if has_denied {
                    DENIED.iter().for_each(|client| world.connect(*client));
                }
                world.connect(*client);
                world.pass(*pause);
            }
            let mut done = world.finish();
            done.retain(|done| !DENIED.contains(&done.client));
            (done, world.maps.count_of(Reason::EndpointEjected), collides)
        };
        let (with, without) = (run(true), run(false));
        prop_assume!(!with.2);
        prop_assert_eq!(with, without);
    }

    /// `silence-ejects-none`: no number of clients puts an endpoint out of use for others by silence.
    #[test]
    fn silence_ejects_none(
        (count, algorithm, are_local) in world(),
        silent in 1..=8u32,
        attempts in prop::collection::vec((0..HZ, 1..60u8), 1..60),
    ) {
        let silent = (silent - 1) % count + 1;
        let mut world = World::new(count, algorithm, are_local, 0);
        world.endpoints.insert(silent, Mode::IsSilent);
        for (pause, client) in attempts {
            world.connect(client);
            world.pass(pause);
        }
        for done in world.finish() {
            // The first retransmission goes to another endpoint.
            prop_assert!(matches!(done.end, End::Connected(id) if id != silent), "{done:?}");
            prop_assert!(done.took <= BACKOFF && done.tried.len() <= 2, "{done:?}");
        }
        prop_assert_eq!(world.maps.count_of(Reason::EndpointEjected), 0);
        // A client that has not met it still selects it.
        let mut fresh = 100..160u8;
        prop_assert!(fresh.any(|client| world.outcome(client).tried[0] == silent));
    }

    /// `slow-answers`: a connection to endpoints whose answers take up to 3 s is established with one of the first two.
    #[test]
    fn slow_answers(
        (count, algorithm, are_local) in world(),
        delay in HZ + 1..3 * HZ,
        is_linear: bool,
        attempts in prop::collection::vec((0..HZ, 1..60u8), 1..40),
    ) {
        let mut world = World::new(count, algorithm, are_local, 0);
        world.is_linear = is_linear;
        world.set_all(Mode::IsSlow(delay));
        for (pause, client) in attempts {
            world.connect(client);
            world.pass(pause);
        }
        for done in world.finish() {
            prop_assert!(matches!(done.end, End::Connected(_)) && done.took <= BACKOFF + delay, "{done:?}");
            prop_assert!(done.tried[1..].iter().all(|id| *id == done.tried[1]), "{done:?}");
        }
    }

    /// `two-silent`: a client whose first two endpoints are silent is served by another one, also if it retransmits each second.
    #[test]
    fn two_silent(
        (count, algorithm, are_local) in (4..=8u32, algorithm(), any::<bool>()),
        is_linear: bool,
        attempts in prop::collection::vec((0..HZ, 1..60u8), 1..40),
    ) {
        let mut world = World::new(count, algorithm, are_local, 0);
        warm_up(&mut world);
        world.is_linear = is_linear;
        (1..=2).for_each(|id| _ = world.endpoints.insert(id, Mode::IsSilent));
        for (pause, client) in attempts {
            world.connect(client);
            world.pass(pause);
        }
        for done in world.finish() {
            prop_assert!(matches!(done.end, End::Connected(_)) && done.took <= 8 * HZ, "{done:?}");
        }
    }

    /// `affinity-stays`: session affinity never moves because of silence.
    #[test]
    fn affinity_stays(
        (count, algorithm, are_local) in world(),
        lost in prop::collection::vec(1..200u32, 0..80),
        events in prop::collection::vec((0..4 * HZ, 1..6u8, 1..=8u32, 0..6u8), 1..40),
    ) {
        let mut world = World::new(count, algorithm, are_local, 10_000);
        world.lost = lost;
        for (pause, client, endpoint, change) in events {
            if let Some(mode) = world.endpoints.get_mut(&endpoint) {
                match change {
                    0 => *mode = Mode::IsSilent,
                    1..=3 => *mode = Mode::Accepts,
                    _ => {}
                }
            }
            world.connect(client);
            world.pass(pause);
        }
        let mut kept = BTreeMap::new();
        for done in world.finish() {
            let of_client = kept.entry(done.client).or_insert(done.tried[0]);
            prop_assert!(done.tried.iter().all(|id| id == of_client), "{of_client} {done:?}");
        }
    }

    /// `affinity-moves-once`: a client whose endpoint refuses it moves to an endpoint that has answered lately, and stays there.
    #[test]
    fn affinity_moves_once(
        (count, algorithm, are_local) in world(),
        client in 1..20u8,
        comes_back: bool,
        pauses in prop::collection::vec(0..4 * HZ, 1..20),
    ) {
        let mut world = World::new(count, algorithm, are_local, 10_000);
        warm_up(&mut world);
        let End::Connected(first) = world.outcome(client).end else { panic!("all endpoints accept") };
        world.endpoints.insert(first, Mode::Refuses);
        let moved = world.outcome(client);
        let End::Connected(second) = moved.end else { panic!("{moved:?}") };
        prop_assert!(second != first && moved.took <= BACKOFF, "{moved:?}");
        if comes_back {
            world.endpoints.insert(first, Mode::Accepts);
        }
        for pause in pauses {
            world.pass(pause);
            prop_assert_eq!(world.outcome(client).tried, std::vec![second]);
        }
    }

    /// `comes-back`: an endpoint that accepts connections again gets its share of all clients 96 s later at most.
    #[test]
    fn comes_back(
        (count, are_local) in (2..=8u32, any::<bool>()),
        events in prop::collection::vec((0..8 * HZ, 1..10u8, 1..=8u32, 0..4u8), 1..60),
    ) {
        let mut world = World::new(count, Algorithm::Random, are_local, 0);
        for (pause, client, endpoint, change) in events {
            if let Some(mode) = world.endpoints.get_mut(&endpoint) {
                *mode = match change {
                    0 | 1 => Mode::Refuses,
                    2 => Mode::IsSilent,
                    _ => Mode::Accepts,
                };
            }
            world.connect(client);
            world.pass(pause);
        }
        world.finish();
        world.set_all(Mode::Accepts);
        world.pass(96 * HZ);
        for client in 1..10u8 {
            let mut met = std::collections::BTreeSet::new();
            for _ in 0..200 {
                let done = world.outcome(client);
                prop_assert!(matches!(done.end, End::Connected(_)) && done.took == 0, "{done:?}");
                met.insert(done.tried[0]);
                world.pass(1);
            }
            prop_assert_eq!(met.len() as u32, count, "client {} does not meet each endpoint", client);
        }
    }

    /// `rollout`: while endpoints are replaced one by one by endpoints that do not listen yet, each after the one before has
    /// answered, no client is refused; none sends a SYN again for an endpoint that listens in time.
    #[test]
    fn rollout(
        (count, algorithm, are_local) in world(),
        starts in HZ / 10..3 * HZ,
        clients in prop::collection::vec(1..40u8, 40),
    ) {
        let mut world = World::new(count, algorithm, are_local, 0);
        warm_up(&mut world);
        let mut serving: Vec<u32> = (1..=count).collect();
        let mut clients = clients.into_iter().cycle();
        let mut go = |world: &mut World| {
            world.connect(clients.next().unwrap_or(1));
            world.pass(HZ / 20);
        };
        for turn in 0..count {
            let new = 10 + turn;
            world.add(new, Mode::Refuses);
            world.maps.health(new).unwrap().store(health::HEALTH_NEWCOMER);
            serving[turn as usize] = new;
            world.serve(&serving);
            let begun = world.now();
            while world.now() - begun < starts {
                go(&mut world);
            }
            world.endpoints.insert(new, Mode::Accepts);
            while !world.done.iter().any(|done| done.end == End::Connected(new)) {
                go(&mut world);
            }
        }
        let most = if starts <= health::JOIN_SECS * HZ { 0 } else { BACKOFF };
        for done in world.finish() {
            prop_assert!(matches!(done.end, End::Connected(_)) && done.took <= most, "{done:?}");
        }
    }
}
