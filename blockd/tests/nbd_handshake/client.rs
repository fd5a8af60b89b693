//! The client against a server that takes every liberty the protocol gives it.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::time::Duration;

use blockd_nbd::client::{
    Client, ClientError, ConnectOptions, Request, ServerAddress, StatusRange, Uri, list,
};
use blockd_nbd::codec::errno;
use blockd_serve::nbd::handshake::Tls;
use blockd_serve::nbd::listener::Limits;
use blockd_testkit::folder::Folder;

use crate::support::{PATIENCE, SIZE, Server};

fn server() -> Server {
    Server::start(Limits::default(), Tls::Off)
}

/// Simple, structured and extended replies.
fn forms() -> [ConnectOptions; 3] {
    let extended = ConnectOptions::default();
    let structured = ConnectOptions { extended: false, ..extended.clone() };
    let simple = ConnectOptions { structured: false, ..structured.clone() };
    [simple, structured, extended]
}

#[test]
fn written_data_is_read_in_all_three_forms() {
    let server = server();
    for (index, options) in forms().iter().enumerate() {
        let mut client = Client::connect(&server.uri("web"), options).unwrap();
        let facts = client.facts().clone();
        assert_eq!((facts.structured, facts.extended), (index >= 1, index == 2));
        assert_eq!((facts.size, facts.block_min, facts.block_max), (SIZE, 512, 32 << 20));
        let data: Vec<u8> = (0..1_u32 << 20).flat_map(u32::to_be_bytes).collect();
        let at = 8 << 20;
        client.write(at, &data, false).unwrap();
        client.flush().unwrap();
        let mut read = vec![1; data.len() + 8192];
        client.read(at - 4096, &mut read).unwrap();
        assert!(read[..4096].iter().all(|byte| *byte == 0));
        assert!(read[4096..4096 + data.len()] == data);
        client.write_zeroes(at, 8192, true).unwrap();
        client.trim(at + 8192, 4096).unwrap();
        client.read(at, &mut read[..16384]).unwrap();
        assert!(read[..12288].iter().all(|byte| *byte == 0));
        client.trim(0, SIZE).unwrap();
        client.disconnect().unwrap();
    }
}

#[test]
fn the_map_says_what_is_a_hole() {
    let server = server();
    for options in &forms()[1..] {
        let mut client = Client::connect(&server.uri("web"), options).unwrap();
        client.trim(0, SIZE).unwrap();
        client.write(8192, &[1; 4096], false).unwrap();
        let hole = |len| StatusRange { len, hole: true, zero: true };
        let data = StatusRange { len: 4096, hole: false, zero: false };
        let expected = [hole(8192), data, hole(SIZE - 12288)];
        assert_eq!(client.block_status(0, SIZE).unwrap(), expected);
        assert_eq!(client.block_status(8192, 512).unwrap(), [StatusRange { len: 512, ..data }]);
    }
    let mut simple = Client::connect(&server.uri("web"), &forms()[0]).unwrap();
    assert!(matches!(simple.block_status(0, 512), Err(ClientError::BadRequest { .. })));
}

#[test]
fn many_requests_in_flight_all_come_back() {
    let server = server();
    for options in forms() {
        let options = ConnectOptions { depth: 32, ..options };
        let mut client = Client::connect(&server.uri("web"), &options).unwrap();
        let blocks = 2000_u64;
        let mut sent = 0;
        let mut done = 0;
        while done < blocks {
            while client.room() && sent < blocks {
                let data = [u8::try_from(sent % 251).unwrap(); 4096];
                client
                    .send(Request::Write { offset: sent * 4096, data: &data, fua: false })
                    .unwrap();
                sent += 1;
            }
            assert!(client.receive().unwrap().result.is_ok());
            done += 1;
        }
        let (mut sent, mut done) = (0, 0);
        while done < blocks {
            while client.room() && sent < blocks {
                client.send(Request::Read { offset: sent * 4096, len: 4096 }).unwrap();
                sent += 1;
            }
            let read = client.receive().unwrap();
            let expected = u8::try_from(read.offset / 4096 % 251).unwrap();
            assert!(read.data.iter().all(|byte| *byte == expected));
            client.recycle(read.data);
            done += 1;
        }
        assert_eq!(client.in_flight(), 0);
    }
}

#[test]
fn a_call_in_between_does_not_lose_what_is_in_flight() {
    let server = server();
    let mut client = Client::connect(&server.uri("web"), &ConnectOptions::default()).unwrap();
    let cookie = client.send(Request::Read { offset: 0, len: 512 }).unwrap();
    client.flush().unwrap();
    assert_eq!(client.in_flight(), 1);
    assert_eq!(client.receive().unwrap().cookie, cookie);
}

#[test]
fn an_error_is_the_request_s_own_and_the_connection_lives() {
    let server = server();
    for options in forms() {
        let mut client = Client::connect(&server.uri("web"), &options).unwrap();
        let mut data = [0; 512];
        data[..8].copy_from_slice(b"no space");
        match client.write(0, &data, false) {
            Err(ClientError::Request { what: "write", error }) => {
                assert_eq!(error.errno, errno::ENOSPC);
                assert_eq!(error.message.is_empty(), !options.structured);
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(client.read(1, &mut data), Err(ClientError::Request { .. })));
        assert!(matches!(client.read(SIZE, &mut data), Err(ClientError::BadRequest { .. })));
        client.read(0, &mut data).unwrap();
    }
    let mut frozen = Client::connect(&server.uri("default/frozen"), &forms()[1]).unwrap();
    assert!(frozen.read_only());
    let error = frozen.write(0, &[0; 512], false).unwrap_err().to_string();
    assert_eq!(error, "write failed: not permitted (errno 1): the export is read-only");
}

#[test]
fn exports_are_listed_with_what_they_are() {
    let server = server();
    let exports = list(&server.uri("").server, PATIENCE).unwrap();
    let names: Vec<_> = exports.iter().map(|export| export.name.as_str()).collect();
    assert_eq!(names, ["default/web", "default/frozen"]);
    assert_eq!(exports[0].description, "64 MiB");
}

#[test]
fn an_unknown_export_and_an_absent_server_are_distinguished() {
    let server = server();
    let unknown = Client::connect(&server.uri("unknown"), &ConnectOptions::default());
    let message = unknown.unwrap_err().to_string();
    assert!(message.contains("there is no such export"), "{message}");
    let nowhere = Uri { server: ServerAddress::Unix("/nonexistent".into()), export: String::new() };
    let absent = Client::connect(&nowhere, &ConnectOptions::default());
    assert!(matches!(absent, Err(ClientError::Connect { .. })));
}

/// A server that sends `bytes` to each client, and then nothing.
fn parrot(bytes: Vec<u8>, stay: bool) -> (Folder, Uri) {
    let scratch = Folder::new("nbd").expect("a folder");
    let path = scratch.path().join("parrot");
    let listener = UnixListener::bind(&path).expect("the parrot can");
    std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("the parrot can");
        stream.write_all(&bytes).expect("the parrot can");
        if stay {
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    (scratch, Uri { server: ServerAddress::Unix(path), export: "web".to_owned() })
}

#[test]
fn servers_that_are_none_silent_or_gone_are_errors_in_time() {
    let options =
        ConnectOptions { timeout: Duration::from_millis(200), ..ConnectOptions::default() };
    let patient = ConnectOptions::default();
    let (_scratch, uri) = parrot(b"HTTP/1.1 400 Bad Request\r\n".to_vec(), true);
    assert!(matches!(Client::connect(&uri, &patient), Err(ClientError::Protocol(_))));
    let (_scratch, uri) = parrot(Vec::new(), true);
    assert!(matches!(Client::connect(&uri, &options), Err(ClientError::TimedOut)));
    let (_scratch, uri) = parrot(b"NBDMAGIC".to_vec(), false);
    assert!(matches!(Client::connect(&uri, &patient), Err(ClientError::HungUp)));
}

#[test]
fn replies_against_the_protocol_end_the_connection() {
    let hello = b"NBDMAGICIHAVEOPT\x00\x03".to_vec();
    let mut granted = hello;
    granted.extend_from_slice(&0x0003_e889_0455_65a9_u64.to_be_bytes());
    granted.extend_from_slice(&[0, 0, 0, 7, 0, 0, 0, 3, 0, 0, 0, 12, 0, 0]);
    granted.extend_from_slice(&(1_u64 << 20).to_be_bytes());
    granted.extend_from_slice(&[0, 1]);
    granted.extend_from_slice(&0x0003_e889_0455_65a9_u64.to_be_bytes());
    granted.extend_from_slice(&[0, 0, 0, 7, 0, 0, 0, 1, 0, 0, 0, 0]);
    let simple = &forms()[0];
    for reply in [
        // A reply to what was not asked.
        [[0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0], [9; 8]].concat(),
        // A structured one that was not negotiated.
        [[0x66, 0x8e, 0x33, 0xef, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0, 1], [0; 8]].concat(),
        vec![0xff; 64],
    ] {
        let (_scratch, uri) = parrot([granted.clone(), reply].concat(), true);
        let mut client = Client::connect(&uri, simple).unwrap();
        assert!(matches!(client.read(0, &mut [0; 512]), Err(ClientError::Protocol(_))));
        assert!(matches!(client.flush(), Err(ClientError::Broken)));
    }
}
