//! `connect_latency`: how long endpoints take to answer a SYN, and how often they refuse it or do not answer. The programs
//! fill the map with `--connect-latency` only.

/// Key of `connect_latency`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LatencyKey {
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend; 0: the total of the Service port, including removed backends.
    pub backend: u32,
}

/// Value of `connect_latency`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyEntry {
    /// Numbers of answered connections, by the time from the first SYN to its answer: see [`bucket`] and [`limit_us`].
    pub buckets: [u64; LATENCY_BUCKETS],
    /// Sum of these times, in microseconds.
    pub sum_us: u64,
    /// Number of SYNs that were answered with a RST.
    pub refused: u64,
    /// Number of SYNs that were retransmitted because no answer had arrived.
    pub retransmits: u64,
}

/// Key of `socket_examples`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExampleKey {
    /// Id of the Service port.
    pub service: u32,
    /// Number of the [`bucket`].
    pub bucket: u32,
}

/// Value of `socket_examples`: the newest connection of a socket in that bucket. Addresses are as in
/// [`SocketStorage`](crate::socket::SocketStorage).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SocketExample {
    /// When the socket sent its first SYN, in nanoseconds of the monotonic clock.
    pub begun: u64,
    /// Nanoseconds until the answer.
    pub took: u64,
    /// The socket's own address.
    pub client: [u32; 4],
    /// The endpoint's address.
    pub backend: [u32; 4],
    /// The socket's own port, host byte order.
    pub client_port: u16,
    /// The endpoint's port, host byte order.
    pub backend_port: u16,
    /// 4 or 6: the family of both addresses.
    pub family: u32,
}

/// Number of buckets of a histogram: the first one up to 32 us, each next one up to twice as much, the last one without limit.
pub const LATENCY_BUCKETS: usize = 20;

/// Bit of a value of `syn_times`: the flow's SYN was answered (not: refused), and the other bits are the time until the
/// answer in nanoseconds. Without this bit, the value is the time of the SYN in nanoseconds of the monotonic clock. The
/// next flow of the entry that begins with a SYN overwrites the value.
pub const ANSWERED: u64 = 1 << 63;

/// Returns the time until the answer in nanoseconds, from a value of `syn_times`; `None` if no answer has arrived.
pub const fn answered_in(value: u64) -> Option<u64> {
    if value & ANSWERED != 0 { Some(value & !ANSWERED) } else { None }
}

/// The limit of the first bucket is 2 to the power of this, in microseconds.
const FIRST_LIMIT: u32 = 5;

/// Returns the number of the bucket of a time in microseconds.
#[inline(always)]
pub const fn bucket(us: u64) -> usize {
    let above = us.saturating_sub(1) >> FIRST_LIMIT;
    let bucket = (u64::BITS - above.leading_zeros()) as usize;
    if bucket < LATENCY_BUCKETS { bucket } else { LATENCY_BUCKETS - 1 }
}

/// Returns the longest time of a bucket, in microseconds; `None` for the last one, which has no limit.
pub const fn limit_us(bucket: usize) -> Option<u64> {
    if bucket + 1 < LATENCY_BUCKETS { Some(1 << (bucket as u32 + FIRST_LIMIT)) } else { None }
}

impl LatencyEntry {
    /// Returns the number of answered connections.
    pub fn answered(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// Returns the time in microseconds within which `per_mille` of 1,000 answered connections got their answer: the limit
    /// of the bucket. `None` if there are none, or the time is in the bucket without limit.
    pub fn quantile_us(&self, per_mille: u64) -> Option<u64> {
        let rank = self.answered().saturating_mul(per_mille).div_ceil(1_000).max(1);
        let mut seen = 0;
        let bucket = self.buckets.iter().position(|count| {
            seen += count;
            seen >= rank
        })?;
        limit_us(bucket)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_limit_belongs_to_its_bucket() {
        assert_eq!(bucket(0), 0);
        for number in 0..LATENCY_BUCKETS - 1 {
            let limit = limit_us(number).unwrap();
            assert_eq!((bucket(limit), bucket(limit + 1)), (number, number + 1), "{limit} us");
        }
        assert_eq!(limit_us(LATENCY_BUCKETS - 1), None);
        assert_eq!(bucket(u64::MAX), LATENCY_BUCKETS - 1);
    }

    #[test]
    fn start_time_is_not_taken_for_an_answer() {
        assert_eq!(answered_in(0), None);
        assert_eq!(answered_in(1_000_000_000), None);
        assert_eq!(answered_in(ANSWERED | 0x11), Some(0x11));
    }

    #[test]
    fn a_quantile_is_the_limit_of_its_bucket() {
        let mut entry = LatencyEntry::default();
        assert_eq!(entry.quantile_us(500), None);
        entry.buckets[1] = 98;
        entry.buckets[4] = 1;
        entry.buckets[LATENCY_BUCKETS - 1] = 1;
        assert_eq!(entry.quantile_us(500), Some(64));
        assert_eq!(entry.quantile_us(980), Some(64));
        assert_eq!(entry.quantile_us(990), Some(512));
        assert_eq!(entry.quantile_us(999), None, "without limit");
    }
}
