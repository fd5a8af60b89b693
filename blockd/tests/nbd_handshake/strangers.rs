//! Misbehaving clients of a listener, which must not affect others.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blockd_nbd::client::{Client, ClientError, ConnectOptions, list};
use blockd_nbd::codec::{cmd, opt, rep};
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::Limits;

use crate::support::{PATIENCE, Server, announced, go, option, request, until};

fn server() -> Server {
    Server::start(Limits::default(), Tls::Off)
}

/// Asserts that another client is served.
fn works(server: &Server) {
    let mut client = Client::connect(&server.uri("web"), &ConnectOptions::default())
        .expect("another client is served");
    let mut block = [0; 512];
    client.read(0, &mut block).expect("another client is served");
}

#[test]
fn a_hundred_idlers_lock_no_client_out_and_are_dropped() {
    let limits = Limits { handshake_time: Duration::from_secs(5), ..Limits::default() };
    let server = Server::start(limits, Tls::Off);
    let mut idlers: Vec<_> = (0..100).map(|_| server.connect()).collect();
    works(&server);
    for idler in &mut idlers {
        idler.hear(18);
        assert!(idler.closed());
    }
    let stats = server.listener().stats();
    until("all are counted", || stats.timed_out.load(Ordering::Relaxed) == 100);
    until("none negotiates", || stats.handshakes.load(Ordering::Relaxed) == 0);
}

#[test]
fn when_idlers_have_all_places_the_oldest_makes_room() {
    let limits =
        Limits { handshakes: 4, handshake_time: Duration::from_secs(600), ..Limits::default() };
    let server = Server::start(limits, Tls::Off);
    let mut idlers: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for idler in &mut idlers {
        idler.greet();
    }
    works(&server);
    assert!(idlers[0].closed());
    assert_eq!(server.listener().stats().displaced.load(Ordering::Relaxed), 1);
    idlers[3].option(opt::LIST, &[]);
    assert_eq!(idlers[3].outcome(), rep::ACK);
}

#[test]
fn one_that_sends_a_byte_at_a_time_is_dropped_in_time_too() {
    let limits = Limits { handshake_time: Duration::from_millis(300), ..Limits::default() };
    let server = Server::start(limits, Tls::Off);
    let mut slow = server.connect();
    slow.hear(18);
    let stats = server.listener().stats();
    until("it is dropped", || {
        let _ = (&slow.0).write(&[0]);
        stats.timed_out.load(Ordering::Relaxed) + stats.failed.load(Ordering::Relaxed) == 1
    });
}

#[test]
fn four_gigabytes_of_option_are_refused_at_once() {
    let server = server();
    for kind in [opt::LIST, opt::GO, opt::INFO, opt::SET_META_CONTEXT, opt::STARTTLS, 1000] {
        let mut raw = server.connect();
        raw.greet();
        raw.say(&announced(kind, u32::MAX, &[]));
        assert_eq!(raw.outcome() & rep::ERROR, rep::ERROR);
        assert!(raw.closed());
    }
    let mut raw = server.connect();
    raw.greet();
    raw.say(&announced(opt::EXPORT_NAME, u32::MAX, &[]));
    assert!(raw.closed());
    works(&server);
}

#[test]
fn the_server_does_not_wait_for_a_name_that_does_not_come() {
    let server = server();
    for name in [4097_u32, 60_000, u32::MAX] {
        let mut raw = server.connect();
        raw.greet();
        raw.say(&announced(opt::GO, 60_000, &name.to_be_bytes()));
        assert_eq!(raw.outcome(), rep::ERR_TOO_BIG);
    }
}

#[test]
fn a_refused_option_is_skipped_and_the_next_one_served() {
    let server = server();
    let mut raw = server.connect();
    raw.greet();
    raw.option(1000, &vec![7; 60_000]);
    raw.option(opt::LIST, &[]);
    assert_eq!(raw.outcome(), rep::ERR_UNSUP);
    assert_eq!(raw.outcome(), rep::ACK);
}

#[test]
fn a_handshake_in_single_bytes_is_as_good() {
    let server = server();
    let mut raw = server.connect();
    raw.hear(18);
    let all = [
        vec![0, 0, 0, 3],
        option(opt::STRUCTURED_REPLY, &[]),
        option(opt::LIST, &[]),
        option(opt::GO, &go("web")),
    ];
    for byte in all.concat() {
        raw.say(&[byte]);
    }
    for _ in 0..3 {
        assert_eq!(raw.outcome(), rep::ACK);
    }
}

#[test]
fn no_byte_after_the_handshake_is_lost() {
    let server = server();
    for enter in [option(opt::GO, &go("web")), option(opt::EXPORT_NAME, b"web")] {
        let mut raw = server.connect();
        raw.hear(18);
        let mut all = vec![0, 0, 0, 3];
        all.extend_from_slice(&enter);
        for cookie in 0..50 {
            all.extend_from_slice(&request(cmd::READ, cookie, 0, 512));
        }
        raw.say(&all);
        if enter[11] == 7 {
            assert_eq!(raw.outcome(), rep::ACK);
        } else {
            raw.hear(10);
        }
        for cookie in 0..50_u64 {
            let reply = raw.hear(16 + 512);
            assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
            assert_eq!(reply[8..16], cookie.to_be_bytes());
        }
    }
}

#[test]
fn abort_is_acknowledged_and_unknown_flags_close() {
    let server = server();
    let mut raw = server.connect();
    raw.greet();
    raw.option(opt::ABORT, b"goodbye");
    assert_eq!(raw.outcome(), rep::ACK);
    assert!(raw.closed());
    let mut raw = server.connect();
    raw.hear(18);
    raw.say(&[0, 0, 0, 4]);
    assert!(raw.closed());
}

#[test]
fn export_name_is_followed_by_zeroes_for_those_who_want_them() {
    let server = server();
    let mut raw = server.connect();
    raw.hear(18);
    raw.say(&[0, 0, 0, 1]);
    raw.option(opt::EXPORT_NAME, b"web");
    assert_eq!(raw.hear(134)[10..], [0; 124]);
    raw.say(&request(cmd::FLUSH, 9, 0, 0));
    assert_eq!(raw.hear(16)[..4], [0x67, 0x44, 0x66, 0x98]);
}

#[test]
fn one_connection_too_many_gets_an_error_and_there_is_room_again() {
    let limits = Limits { connections: 2, ..Limits::default() };
    let server = Server::start(limits, Tls::Off);
    let connect = || Client::connect(&server.uri("web"), &ConnectOptions::default());
    let (first, _second) = (connect().unwrap(), connect().unwrap());
    match connect() {
        Err(ClientError::Refused { reply, message, .. }) => {
            assert_eq!((reply, message.as_str()), (rep::ERR_POLICY, "too many connections"));
        }
        other => panic!("{other:?}"),
    }
    // A list needs no place.
    assert_eq!(list(&server.uri("").server, PATIENCE).unwrap().len(), 2);
    drop(first);
    until("its place is free", || connect().is_ok());
}

#[test]
fn exports_that_cannot_be_had_are_errors_of_their_own() {
    let server = server();
    let mut raw = server.connect();
    raw.greet();
    raw.option(opt::GO, &go("unknown"));
    assert_eq!(raw.outcome(), rep::ERR_UNKNOWN);
    raw.option(opt::GO, &go("default/busy"));
    let (_, kind, message) = raw.reply();
    assert_eq!((kind, message.as_slice()), (rep::ERR_POLICY, b"it is being deleted".as_slice()));
    raw.option(opt::GO, &go(""));
    assert_eq!(raw.outcome(), rep::ACK);
}

#[test]
fn no_bytes_end_the_server() {
    let server = server();
    let mut random = fastrand::Rng::with_seed(3);
    for round in 0..400 {
        let raw = server.connect();
        let mut bytes = vec![0, 0, 0, random.u8(0..5)];
        if round % 2 == 0 {
            let len = if random.bool() { random.u32(0..100) } else { random.u32(..) };
            bytes.extend_from_slice(&announced(random.u32(0..13), len, &[]));
        }
        bytes.extend((0..random.usize(0..300)).map(|_| random.u8(..)));
        // It may hang up in the middle of this.
        let _ = (&raw.0).write_all(&bytes);
        if random.bool() {
            let _ = raw.0.shutdown(Shutdown::Write);
        }
    }
    works(&server);
}
