//! The BPF object: entry points only. Each calls one hook function and returns its verdict.
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

#[cfg(not(target_arch = "bpf"))]
fn main() {}

#[cfg(target_arch = "bpf")]
#[expect(clippy::needless_pass_by_value, reason = "the macros hand contexts over by value")]
mod programs {
    use aya_ebpf::macros::{cgroup_sock, cgroup_sock_addr, classifier};
    use aya_ebpf::programs::{SockAddrContext, SockContext, TcContext};
    use proxy_ebpf::hook::{bind, clock, socket, tc};
    use proxy_ebpf::sockaddr::{Bound, Sockaddr4, Sockaddr6};

    #[cgroup_sock_addr(connect4)]
    pub fn sock_connect4(ctx: SockAddrContext) -> i32 {
        socket::connect(&Sockaddr4::new(&ctx))
    }

    #[cgroup_sock_addr(connect6)]
    pub fn sock_connect6(ctx: SockAddrContext) -> i32 {
        let sockaddr = Sockaddr6::new(&ctx);
        match sockaddr.mapped() {
            Some(mapped) => socket::connect(&mapped),
            None => socket::connect(&sockaddr),
        }
    }

    #[cgroup_sock_addr(sendmsg4)]
    pub fn sock_sendmsg4(ctx: SockAddrContext) -> i32 {
        socket::send(&Sockaddr4::new(&ctx))
    }

    #[cgroup_sock_addr(sendmsg6)]
    pub fn sock_sendmsg6(ctx: SockAddrContext) -> i32 {
        let sockaddr = Sockaddr6::new(&ctx);
        match sockaddr.mapped() {
            Some(mapped) => socket::send(&mapped),
            None => socket::send(&sockaddr),
        }
    }

    #[cgroup_sock_addr(recvmsg4)]
    pub fn sock_recvmsg4(ctx: SockAddrContext) -> i32 {
        socket::restore(&Sockaddr4::new(&ctx))
    }

    #[cgroup_sock_addr(recvmsg6)]
    pub fn sock_recvmsg6(ctx: SockAddrContext) -> i32 {
        let sockaddr = Sockaddr6::new(&ctx);
        match sockaddr.mapped() {
            Some(mapped) => socket::restore(&mapped),
            None => socket::restore(&sockaddr),
        }
    }

    #[cgroup_sock_addr(getpeername4)]
    pub fn sock_peer4(ctx: SockAddrContext) -> i32 {
        socket::restore(&Sockaddr4::new(&ctx))
    }

    #[cgroup_sock_addr(getpeername6)]
    pub fn sock_peer6(ctx: SockAddrContext) -> i32 {
        let sockaddr = Sockaddr6::new(&ctx);
        match sockaddr.mapped() {
            Some(mapped) => socket::restore(&mapped),
            None => socket::restore(&sockaddr),
        }
    }

    #[cgroup_sock(post_bind4)]
    pub fn sock_bind4(ctx: SockContext) -> i32 {
        bind::bound4(&Bound::new(&ctx))
    }

    #[cgroup_sock(post_bind6)]
    pub fn sock_bind6(ctx: SockContext) -> i32 {
        bind::bound6(&Bound::new(&ctx))
    }

    #[classifier]
    pub fn tc_ingress(ctx: TcContext) -> i32 {
        tc::ingress(&ctx)
    }

    #[classifier]
    pub fn tc_egress(ctx: TcContext) -> i32 {
        tc::egress(&ctx)
    }

    /// Never attached: run by `BPF_PROG_TEST_RUN`, it tells the two clocks, from which the agent learns how many
    /// jiffies a second has. Writes `bpf_jiffies64()` and `bpf_ktime_get_ns()` over the first 16 bytes.
    #[classifier]
    pub fn clock(ctx: TcContext) -> i32 {
        clock::clock(&ctx)
    }

    /// Never attached: the floor of a measurement by `BPF_PROG_TEST_RUN`.
    #[classifier]
    pub fn nop(_ctx: TcContext) -> i32 {
        tc::NEXT
    }

    #[panic_handler]
    fn panic(_info: &core::panic::PanicInfo<'_>) -> ! {
        loop {}
    }

    #[unsafe(link_section = "license")]
    #[unsafe(no_mangle)]
    static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
}
