//! Replies in all three forms, byte for byte.

use blockd_nbd::codec::reply::{self, MAX_HEADER_BYTES};
use blockd_nbd::codec::{chunk, errno, rep};

use crate::{ASKED, Form, agreed, hex};

fn written(write: impl FnOnce(&mut [u8]) -> usize) -> Vec<u8> {
    let mut out = [0xee; 256];
    let length = write(&mut out);
    out[..length].to_vec()
}

#[test]
fn success_in_every_form() {
    let done = |form| written(|out| reply::done(out, &agreed(form), ASKED));
    assert_eq!(done(Form::Simple), hex("67446698 00000000 0102030405060708"));
    assert_eq!(done(Form::Structured), hex("668e33ef 0001 0000 0102030405060708 00000000"));
    assert_eq!(
        done(Form::Extended),
        hex("6e8a278c 0001 0000 0102030405060708 0000000000001000 0000000000000000")
    );
}

#[test]
fn errors_in_every_form() {
    let error = |form| written(|out| reply::error(out, &agreed(form), ASKED, errno::ENOSPC, "no"));
    assert_eq!(error(Form::Simple), hex("67446698 0000001c 0102030405060708"));
    assert_eq!(
        error(Form::Structured),
        hex("668e33ef 0001 8001 0102030405060708 00000008 0000001c 0002 6e6f")
    );
    assert_eq!(
        error(Form::Extended),
        hex("6e8a278c 0001 8001 0102030405060708 0000000000001000 0000000000000008
             0000001c 0002 6e6f")
    );
    let at =
        |form| written(|out| reply::error_at(out, &agreed(form), ASKED, (errno::EIO, ""), 0x1200));
    assert_eq!(at(Form::Simple), hex("67446698 00000005 0102030405060708"));
    assert_eq!(
        at(Form::Structured),
        hex("668e33ef 0001 8002 0102030405060708 0000000e 00000005 0000 0000000000001200")
    );
}

#[test]
fn data_in_every_form() {
    let data = |form, done| {
        written(|out| reply::read_data(out, &agreed(form), ASKED, (0x1200, 512), done))
    };
    assert_eq!(data(Form::Simple, true), hex("67446698 00000000 0102030405060708"));
    assert_eq!(
        data(Form::Structured, true),
        hex("668e33ef 0001 0001 0102030405060708 00000208 0000000000001200")
    );
    assert_eq!(
        data(Form::Extended, false),
        hex("6e8a278c 0000 0001 0102030405060708 0000000000001000 0000000000000208
             0000000000001200")
    );
}

#[test]
fn holes_in_both_forms_that_have_them() {
    let hole =
        |form| written(|out| reply::read_hole(out, &agreed(form), ASKED, (0x1200, 512), false));
    assert_eq!(
        hole(Form::Structured),
        hex("668e33ef 0000 0002 0102030405060708 0000000c 0000000000001200 00000200")
    );
    assert_eq!(
        hole(Form::Extended),
        hex("6e8a278c 0000 0002 0102030405060708 0000000000001000 000000000000000c
             0000000000001200 00000200")
    );
}

#[test]
fn status_in_both_forms_that_have_it() {
    let ranges = [(4096, 0), (8192, 3)];
    let status = |form| {
        written(|out| reply::block_status(out, &agreed(form), ASKED, (1, true), ranges.into_iter()))
    };
    assert_eq!(
        status(Form::Structured),
        hex("668e33ef 0001 0005 0102030405060708 00000014 00000001
             00001000 00000000 00002000 00000003")
    );
    assert_eq!(
        status(Form::Extended),
        hex("6e8a278c 0001 0006 0102030405060708 0000000000001000 0000000000000028
             00000001 00000002
             0000000000001000 0000000000000000 0000000000002000 0000000000000003")
    );
}

#[test]
fn a_status_of_several_contexts_is_done_with_the_last() {
    let ranges = [(4096, 1)];
    let status = |id, done| {
        let (agreed, ranges) = (agreed(Form::Structured), ranges.into_iter());
        written(|out| reply::block_status(out, &agreed, ASKED, (id, done), ranges))
    };
    let first = hex("668e33ef 0000 0005 0102030405060708 0000000c 00000001 00001000 00000001");
    let last = hex("668e33ef 0001 0005 0102030405060708 0000000c 00000007 00001000 00000001");
    assert_eq!((status(1, false), status(7, true)), (first, last));
}

#[test]
fn status_writes_what_there_is_room_for() {
    let agreed = agreed(Form::Structured);
    let mut out = vec![0; reply::block_status_bytes(&agreed, 3) + 7];
    let ranges = std::iter::repeat_n((512, 0), 100);
    assert_eq!(reply::block_status(&mut out, &agreed, ASKED, (1, true), ranges), 24 + 3 * 8);
    assert_eq!(&out[16..20], &[0, 0, 0, 4 + 3 * 8]);
}

#[test]
fn a_range_longer_than_32_bits_is_cut_at_a_block_and_ends_a_compact_status() {
    let agreed = agreed(Form::Structured);
    let mut out = [0; 64];
    let ranges = [(512, 0), (1 << 40, 3), (512, 0)];
    let length = reply::block_status(&mut out, &agreed, ASKED, (1, true), ranges.into_iter());
    assert_eq!(out[24..length], hex("00000200 00000000 fffffe00 00000003"));
}

#[test]
fn messages_are_cut_in_whole_characters_and_errno_is_never_zero() {
    let long = "é".repeat(5000);
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        let bytes = written(|out| reply::error_at(out, &agreed(form), ASKED, (0, &long), u64::MAX));
        assert!(bytes.len() <= MAX_HEADER_BYTES);
        if let Form::Extended = form {
            let message = &bytes[38..bytes.len() - 8];
            assert!(std::str::from_utf8(message).expect("it fits").chars().all(|c| c == 'é'));
        }
    }
    let simple = written(|out| reply::error(out, &agreed(Form::Simple), ASKED, 0, ""));
    assert_eq!(simple, hex("67446698 00000005 0102030405060708"));
}

#[test]
fn chunk_types_of_errors_have_their_bit() {
    assert_eq!((chunk::ERROR, chunk::ERROR_OFFSET), (32769, 32770));
    assert_eq!(rep::ERR_EXT_HEADER_REQD, (1 << 31) + 10);
}
