//! `connect_latency`: how long endpoints take to answer a SYN, and how often they refuse it or stay silent. Filled with
//! `--connect-latency` only.

/// Key of `connect_latency`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LatencyKey {
    /// Id of the Service port.
    pub service: u32,
    /// Id of the backend; 0: all of the Service, also those that have left it.
    pub backend: u32,
}

/// Value of `connect_latency`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyEntry {
    /// Answered connections, by the time from the first SYN to its answer: see [`bucket`] and [`limit_us`].
    pub buckets: [u64; LATENCY_BUCKETS],
    /// Microseconds of all of them together.
    pub sum_us: u64,
    /// SYNs that were answered by a reset.
    pub refused: u64,
    /// SYNs that were sent again, since no answer had come.
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

/// Buckets of a histogram: up to 32 us, each next one up to twice as much, and the last one without limit.
pub const LATENCY_BUCKETS: usize = 20;

/// A value of `syn_times` is the time of a flow's SYN, in nanoseconds of the monotonic clock, until that is answered (not: refused);
/// then it is this bit and how many nanoseconds that took. The next flow of the entry that begins with a SYN writes its own.
pub const ANSWERED: u64 = 1 << 63;

/// How many nanoseconds a value of `syn_times` says that the answer took; `None`: none has come.
pub const fn answered_in(value: u64) -> Option<u64> {
    if value & ANSWERED != 0 { Some(value & !ANSWERED) } else { None }
}

/// The limit of the first bucket is 2 to this power.
const FIRST_LIMIT: u32 = 5;

/// The bucket of a time in microseconds.
#[inline(always)]
pub const fn bucket(us: u64) -> usize {
    let above = us.saturating_sub(1) >> FIRST_LIMIT;
    let bucket = (u64::BITS - above.leading_zeros()) as usize;
    if bucket < LATENCY_BUCKETS { bucket } else { LATENCY_BUCKETS - 1 }
}

/// The longest time of a bucket, in microseconds; `None` for the last one, which has no limit.
pub const fn limit_us(bucket: usize) -> Option<u64> {
    if bucket + 1 < LATENCY_BUCKETS { Some(1 << (bucket as u32 + FIRST_LIMIT)) } else { None }
}

impl LatencyEntry {
    /// Connections that were answered.
    pub fn answered(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The time in microseconds within which this part of a thousand of the connections were answered: the limit of their
    /// bucket. `None`: there are none, or it lies in the bucket without limit.
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
    fn a_time_is_no_answer() {
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
