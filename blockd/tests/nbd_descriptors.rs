//! Thousands of clients that come and go in every way leave nothing behind. Alone in its
//! process, because it counts what the process has.
#![forbid(unsafe_code)]

#[path = "nbd_support/mod.rs"]
#[expect(dead_code, reason = "shared with the tests of the handshake")]
mod support;

use std::net::Shutdown;
use std::sync::atomic::Ordering;

use blockd_nbd::codec::{cmd, opt, rep};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::Limits;
use support::{Server, announced, go, request, until};

const CONNECTS: usize = 4000;

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("a /proc").count()
}

/// Bytes of memory that the process has.
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").expect("a /proc");
    let pages = statm.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    pages.expect("a number of pages") * 4096
}

/// One client, which leaves at a different point each time.
fn visit(server: &Server, round: usize) {
    let mut raw = server.connect();
    match round % 8 {
        0 => {}
        1 => raw.greet(),
        2 => {
            raw.greet();
            raw.say(b"IHAVE");
        }
        3 => {
            raw.greet();
            raw.say(&announced(opt::GO, 60_000, &[0, 0, 0, 3]));
        }
        4 => {
            raw.greet();
            raw.0.shutdown(Shutdown::Write).expect("half of it is closed");
        }
        5 => {
            raw.greet();
            raw.option(opt::ABORT, &[]);
            assert_eq!(raw.outcome(), rep::ACK);
        }
        6 => {
            raw.greet();
            raw.option(opt::GO, &go("web"));
            assert_eq!(raw.outcome(), rep::ACK);
            raw.say(&request(cmd::READ, 1, 0, 65536)[..20]);
        }
        _ => {
            raw.greet();
            raw.option(opt::GO, &go("web"));
            assert_eq!(raw.outcome(), rep::ACK);
            raw.say(&request(cmd::READ, 1, 0, 4096));
            raw.say(&request(cmd::DISC, 2, 0, 0));
            raw.hear(16 + 4096);
        }
    }
}

#[test]
fn thousands_of_connects_and_half_closes_leave_no_descriptor_and_no_memory() {
    let server = Server::start(Limits::default(), Tls::Off);
    let stats = server.listener().stats();
    let settled = |visits: usize| {
        until("all have gone", || {
            let gone = stats.failed.load(Ordering::Relaxed) + server.ended.load(Ordering::Acquire);
            stats.handshakes.load(Ordering::Relaxed) == 0
                && usize::try_from(gone).is_ok_and(|gone| gone == visits)
        });
    };
    // The first ones make what is kept for all others.
    (0..400).for_each(|round| visit(&server, round));
    settled(400);
    let before = (descriptors(), resident());
    (400..CONNECTS).for_each(|round| visit(&server, round));
    settled(CONNECTS);
    // A task that has ended may still be letting go of its socket.
    until("no descriptor is left", || descriptors() <= before.0);
    let grown = resident().saturating_sub(before.1);
    assert!(grown < 8 << 20, "{grown} bytes more after {CONNECTS} connects");
}
