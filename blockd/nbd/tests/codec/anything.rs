//! Bytes that no proper client sends.

use blockd_nbd::Negotiated;
use blockd_nbd::codec::handshake::{MAX_OPTION_BYTES, TlsMode};
use blockd_nbd::codec::reply::{self, MAX_HEADER_BYTES};
use blockd_nbd::codec::request::{Command, MAX_SKIP_BYTES, Parsed, check, parse};
use proptest::prelude::*;

use crate::talk::{End, FLAGS, Talk, announced, contexts, go};
use crate::{ASKED, Form, GIB, agreed};

fn check_total(bytes: &[u8], agreed: &Negotiated) {
    let Parsed::Header(header, used) = parse(bytes, agreed.extended) else { return };
    assert!(used <= bytes.len());
    let mut out = [0; 256];
    match check(&header, agreed) {
        Ok(Command::Read { offset, len, .. } | Command::Write { offset, len, .. }) => {
            assert!(offset + u64::from(len) <= agreed.size && len <= agreed.block_max);
        }
        Ok(
            Command::Trim { offset, len, .. }
            | Command::WriteZeroes { offset, len, .. }
            | Command::Cache { offset, len }
            | Command::BlockStatus { offset, len, .. },
        ) => assert!(offset.checked_add(len).expect("it fits") <= agreed.size),
        Ok(Command::Flush | Command::Disconnect) => {}
        Err(refusal) => {
            assert!(refusal.skip <= MAX_SKIP_BYTES && refusal.errno != 0);
            let asked = header.asked();
            let length = reply::error(&mut out, agreed, asked, refusal.errno, refusal.message);
            assert!(length <= MAX_HEADER_BYTES);
        }
    }
}

fn forms() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Simple), Just(Form::Structured), Just(Form::Extended)]
}

/// A request that gets past the magic.
fn nearly_a_request(form: Form) -> impl Strategy<Value = Vec<u8>> {
    let magic: u32 = if let Form::Extended = form { 0x21e4_1c71 } else { 0x2560_9513 };
    let numbers = prop_oneof![0..2 * GIB, any::<u64>(), (0..1_u64 << 22).prop_map(|n| n * 512)];
    (any::<u8>(), 0..10_u16, any::<u64>(), numbers.clone(), numbers).prop_map(
        move |(flags, kind, cookie, offset, len)| {
            let mut bytes = magic.to_be_bytes().to_vec();
            bytes.extend_from_slice(&u16::from(flags).to_be_bytes());
            bytes.extend_from_slice(&kind.to_be_bytes());
            bytes.extend_from_slice(&cookie.to_be_bytes());
            bytes.extend_from_slice(&offset.to_be_bytes());
            match form {
                Form::Extended => bytes.extend_from_slice(&len.to_be_bytes()),
                _ => bytes.extend_from_slice(&len.to_be_bytes()[4..]),
            }
            bytes
        },
    )
}

/// Options that are nearly right: their headers are, their data is anything.
fn nearly_options() -> impl Strategy<Value = Vec<u8>> {
    let data = prop_oneof![
        proptest::collection::vec(any::<u8>(), 0..64),
        proptest::collection::vec(0..4_u8, 0..64),
        Just(go("web", &[1, 2, 3])),
        Just(contexts("web", &["base:allocation", "base:"])),
        Just(Vec::new()),
    ];
    let one = (0..14_u32, data, proptest::option::weighted(0.1, any::<u32>())).prop_map(
        |(kind, data, len)| {
            let right = u32::try_from(data.len()).expect("it fits");
            announced(kind, len.unwrap_or(right), &data)
        },
    );
    proptest::collection::vec(one, 0..12).prop_map(|options| options.concat())
}

fn tls_modes() -> impl Strategy<Value = TlsMode> {
    prop_oneof![Just(TlsMode::Off), Just(TlsMode::On), Just(TlsMode::Required)]
}

proptest! {
    #[test]
    fn no_request_is_too_strange(
        (form, bytes) in forms().prop_flat_map(|form| (Just(form), nearly_a_request(form))),
    ) {
        check_total(&bytes, &agreed(form));
    }

    #[test]
    fn no_bytes_are_too_strange_for_requests(
        form in forms(),
        bytes in proptest::collection::vec(any::<u8>(), 0..64),
    ) {
        check_total(&bytes, &agreed(form));
    }

    #[test]
    fn no_status_writes_past_its_buffer(
        form in forms(),
        room in 64..400_usize,
        ranges in proptest::collection::vec((1..u64::MAX, any::<u32>()), 1..40),
    ) {
        let mut out = vec![0; room];
        let length =
            reply::block_status(&mut out, &agreed(form), ASKED, (1, true), ranges.into_iter());
        prop_assert!(length <= room);
    }

    #[test]
    fn no_handshake_is_too_strange(tls in tls_modes(), options in nearly_options()) {
        let mut talk = Talk::new(tls, &[FLAGS.to_vec(), options].concat());
        let end = talk.run();
        prop_assert!(talk.most_asked <= usize::try_from(MAX_OPTION_BYTES).expect("it fits"));
        if let End::Entered(agreed) = end {
            prop_assert!(tls != TlsMode::Required || agreed.tls);
            prop_assert!(agreed.structured || agreed.contexts.is_empty());
        }
    }
}

/// The same bytes on every machine, as many as there were the last time.
#[test]
fn two_hundred_thousand_random_messages() {
    let mut random = fastrand::Rng::with_seed(7);
    let modes = [TlsMode::Off, TlsMode::On, TlsMode::Required];
    let forms = [Form::Simple, Form::Structured, Form::Extended];
    for round in 0..200_000 {
        let mut bytes: Vec<u8> = (0..random.usize(0..200)).map(|_| random.u8(..)).collect();
        let agreed = agreed(forms[round % 3]);
        if random.bool() && bytes.len() >= 8 {
            let magic: u32 = if agreed.extended { 0x21e4_1c71 } else { 0x2560_9513 };
            bytes[..4].copy_from_slice(&magic.to_be_bytes());
            bytes[6] = 0;
            bytes[7] %= 9;
        }
        check_total(&bytes, &agreed);
        let kind = random.u32(0..13);
        let len = if random.bool() { random.u32(0..200) } else { random.u32(..) };
        let start = if random.bool() { announced(kind, len, &[]) } else { Vec::new() };
        Talk::new(modes[round % 3], &[FLAGS.to_vec(), start, bytes].concat()).run();
    }
}
