//! Requests: their parsing, their validation, and the errors of refused ones.

use blockd_nbd::Negotiated;
use blockd_nbd::codec::request::{
    Command, Header, MAX_SKIP_BYTES, Parsed, check, parse, payload_len,
};
use blockd_nbd::codec::{cmd, errno, flag, reply, transmission};

use crate::{ASKED, Form, GIB, agreed, hex};

#[test]
fn a_compact_request_is_read_as_the_document_has_it() {
    let bytes = hex("25609513 0001 0001 0102030405060708 0000000000001000 00000200 aa");
    let header = Header {
        flags: flag::FUA,
        kind: cmd::WRITE,
        cookie: ASKED.cookie,
        offset: 0x1000,
        len: 512,
    };
    assert_eq!(parse(&bytes, false), Parsed::Header(header, 28));
    let command = Command::Write { offset: 0x1000, len: 512, fua: true };
    assert_eq!(check(&header, &agreed(Form::Simple)), Ok(command));
    assert_eq!(payload_len(&header, &agreed(Form::Simple)), 512);
}

#[test]
fn an_extended_request_is_read_as_the_document_has_it() {
    let bytes = hex("21e41c71 0000 0006 0102030405060708 0000000000001000 0000000020000000");
    let header =
        Header { flags: 0, kind: 6, cookie: ASKED.cookie, offset: 0x1000, len: 0x2000_0000 };
    assert_eq!(parse(&bytes, true), Parsed::Header(header, 32));
    let command = Command::WriteZeroes {
        offset: 0x1000,
        len: 0x2000_0000,
        fua: false,
        no_hole: false,
        fast_zero: false,
    };
    assert_eq!(check(&header, &agreed(Form::Extended)), Ok(command));
}

#[test]
fn a_request_of_the_form_that_was_not_agreed_on_is_none() {
    let compact = hex("25609513 0000 0003 0000000000000001 0000000000000000 00000000");
    assert_eq!(parse(&compact, true), Parsed::BadMagic(0x2560_9513));
    let extended = hex("21e41c71 0000 0003 0000000000000001 0000000000000000 0000000000000000");
    assert_eq!(parse(&extended, false), Parsed::BadMagic(0x21e4_1c71));
}

#[test]
fn a_cut_request_says_what_it_lacks_and_a_wrong_magic_shows_in_four_bytes() {
    let bytes = hex("25609513 0000 0003 0000000000000001 0000000000000000 00000000");
    for length in 0..28 {
        assert_eq!(parse(&bytes[..length], false), Parsed::Need(28 - length));
    }
    assert_eq!(parse(b"GET ", false), Parsed::BadMagic(0x4745_5420));
}

fn request(kind: u16, flags: u16, offset: u64, len: u64) -> Header {
    Header { flags, kind, cookie: 1, offset, len }
}

/// The error of a refused request, the number of skipped bytes, and whether the connection ends.
fn refused(header: Header, agreed: &Negotiated) -> (u32, u64, bool) {
    let refusal = check(&header, agreed).expect_err("a refusal");
    assert!(!refusal.message.is_empty() && refusal.message.len() <= reply::MAX_MESSAGE_BYTES);
    (refusal.errno, refusal.skip, refusal.hang_up)
}

#[test]
fn past_the_end_is_no_space_for_writes_and_invalid_for_the_rest() {
    let agreed = agreed(Form::Structured);
    for offset in [GIB, GIB - 512, u64::MAX - 511] {
        for (kind, expected) in [
            (cmd::READ, errno::EINVAL),
            (cmd::TRIM, errno::EINVAL),
            (cmd::CACHE, errno::EINVAL),
            (cmd::BLOCK_STATUS, errno::EINVAL),
            (cmd::WRITE_ZEROES, errno::ENOSPC),
        ] {
            let header = request(kind, 0, offset, 1024);
            assert_eq!(refused(header, &agreed), (expected, 0, false), "{kind} at {offset}");
        }
        // Its payload follows all the same.
        let write = request(cmd::WRITE, 0, offset, 1024);
        assert_eq!(refused(write, &agreed), (errno::ENOSPC, 1024, false));
    }
}

#[test]
fn a_request_off_block_boundaries_is_invalid() {
    let agreed = agreed(Form::Structured);
    for (offset, len) in [(1, 512), (0, 511), (256, 256)] {
        for kind in [cmd::READ, cmd::TRIM, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS, cmd::CACHE] {
            let header = request(kind, 0, offset, len);
            assert_eq!(refused(header, &agreed), (errno::EINVAL, 0, false));
        }
    }
}

#[test]
fn an_unknown_command_or_flag_is_invalid_and_the_connection_lives() {
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        let agreed = agreed(form);
        for kind in [8, 9, 1000, u16::MAX] {
            assert_eq!(refused(request(kind, 0, 0, 512), &agreed), (errno::EINVAL, 0, false));
        }
        for kind in [cmd::READ, cmd::FLUSH, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
            let header = request(kind, 1 << 15, 0, 0);
            assert_eq!(refused(header, &agreed), (errno::EINVAL, 0, false));
        }
    }
    let payload = request(cmd::WRITE, flag::PAYLOAD_LEN, 0, 512);
    assert_eq!(refused(payload, &agreed(Form::Simple)), (errno::EINVAL, 512, false));
    let df = request(cmd::READ, flag::DF, 0, 512);
    assert_eq!(refused(df, &agreed(Form::Simple)), (errno::EINVAL, 0, false));
    assert!(check(&df, &agreed(Form::Structured)).is_ok());
}

#[test]
fn fua_is_taken_with_every_command() {
    let agreed = agreed(Form::Structured);
    for (kind, len) in [(cmd::READ, 512), (cmd::FLUSH, 0), (cmd::TRIM, 512), (cmd::CACHE, 512)] {
        assert!(check(&request(kind, flag::FUA, 0, len), &agreed).is_ok());
    }
}

#[test]
fn too_long_a_payload_is_skipped_or_ends_the_connection() {
    let mut agreed = agreed(Form::Simple);
    agreed.size = 1 << 40;
    let four_gib = u64::from(u32::MAX) & !511;
    assert_eq!(refused(request(cmd::READ, 0, 0, four_gib), &agreed), (errno::EINVAL, 0, false));
    let write = request(cmd::WRITE, 0, 0, (32 << 20) + 512);
    assert_eq!(refused(write, &agreed), (errno::EINVAL, (32 << 20) + 512, false));
    let write = request(cmd::WRITE, 0, 0, MAX_SKIP_BYTES + 512);
    assert_eq!(refused(write, &agreed), (errno::EINVAL, 0, true));
    assert!(check(&request(cmd::WRITE, 0, 0, 32 << 20), &agreed).is_ok());
}

#[test]
fn with_extended_headers_payload_is_what_the_flag_says() {
    let agreed = agreed(Form::Extended);
    let write = request(cmd::WRITE, flag::PAYLOAD_LEN, 0, 512);
    assert_eq!(check(&write, &agreed), Ok(Command::Write { offset: 0, len: 512, fua: false }));
    // A write without it may be followed by payload or not.
    assert_eq!(refused(request(cmd::WRITE, 0, 0, 512), &agreed), (errno::EINVAL, 0, true));
    // Status of chosen contexts is not offered; its payload is skipped.
    let status = request(cmd::BLOCK_STATUS, flag::PAYLOAD_LEN, 0, 24);
    assert_eq!(refused(status, &agreed), (errno::EINVAL, 24, false));
    let unknown = request(77, flag::PAYLOAD_LEN, 0, 4096);
    assert_eq!(refused(unknown, &agreed), (errno::EINVAL, 4096, false));
    let huge = request(77, flag::PAYLOAD_LEN, 0, (32 << 20) + 1);
    assert_eq!(refused(huge, &agreed), (errno::EINVAL, 0, true));
    let wrapping = request(cmd::TRIM, 0, 4096, u64::MAX - 4095);
    assert_eq!(refused(wrapping, &agreed), (errno::EINVAL, 0, false));
}

#[test]
fn nothing_writes_to_a_read_only_export() {
    let agreed = Negotiated { read_only: true, ..agreed(Form::Structured) };
    assert_eq!(refused(request(cmd::WRITE, 0, 0, 512), &agreed), (errno::EPERM, 512, false));
    for kind in [cmd::TRIM, cmd::WRITE_ZEROES] {
        assert_eq!(refused(request(kind, 0, 0, 512), &agreed), (errno::EPERM, 0, false));
    }
    assert!(check(&request(cmd::READ, 0, 0, 512), &agreed).is_ok());
    let flags = agreed.transmission_flags();
    assert_ne!(flags & transmission::READ_ONLY, 0);
    assert_eq!(flags & transmission::SEND_WRITE_ZEROES, 0);
    assert_eq!(flags & transmission::SEND_FAST_ZERO, 0);
}

#[test]
fn zeroes_are_fast_unless_they_keep_their_space() {
    let agreed = agreed(Form::Structured);
    let both = flag::NO_HOLE | flag::FAST_ZERO;
    let slow = request(cmd::WRITE_ZEROES, both, 0, 512);
    assert_eq!(refused(slow, &agreed), (errno::ENOTSUP, 0, false));
    for flags in [0, flag::NO_HOLE, flag::FAST_ZERO] {
        assert!(check(&request(cmd::WRITE_ZEROES, flags, 0, 512), &agreed).is_ok());
    }
}

#[test]
fn a_length_of_zero_succeeds_except_where_the_answer_cannot_be_empty() {
    let agreed = agreed(Form::Structured);
    for kind in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES, cmd::CACHE] {
        assert!(check(&request(kind, 0, GIB, 0), &agreed).is_ok());
        assert!(check(&request(kind, 0, GIB + 512, 0), &agreed).is_err());
    }
    let status = request(cmd::BLOCK_STATUS, 0, 0, 0);
    assert_eq!(refused(status, &agreed), (errno::EINVAL, 0, false));
}

#[test]
fn status_needs_a_context_and_flush_has_no_range() {
    let none = Negotiated { contexts: Vec::new(), ..agreed(Form::Structured) };
    let status = request(cmd::BLOCK_STATUS, flag::REQ_ONE, 0, 512);
    assert_eq!(refused(status, &none), (errno::EINVAL, 0, false));
    let command = Command::BlockStatus { offset: 0, len: 512, req_one: true };
    assert_eq!(check(&status, &agreed(Form::Structured)), Ok(command));
    assert_eq!(refused(request(cmd::FLUSH, 0, 0, 1), &none), (errno::EINVAL, 0, false));
    assert_eq!(check(&request(cmd::FLUSH, 0, 0, 0), &none), Ok(Command::Flush));
    assert_eq!(check(&request(cmd::DISC, 7, 7, 7), &none), Ok(Command::Disconnect));
}
