//! The volume `data`, written while commands run, and compared.
#![allow(dead_code, clippy::unwrap_used, reason = "shared by test files; a failure fails the test")]

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Daemon, connect, wait_until};

const MIB: usize = 1 << 20;
const BLOCK: usize = 4096;

/// Compares a volume's content.
pub(crate) fn holds(daemon: &Daemon, volume: &str, expected: &[u8]) {
    let mut client = connect(daemon, volume);
    let mut found = vec![0; expected.len()];
    for (at, part) in found.chunks_mut(MIB).enumerate() {
        client.read((at * MIB) as u64, part).unwrap();
    }
    let differs = expected.chunks(BLOCK).zip(found.chunks(BLOCK)).position(|(a, b)| a != b);
    assert_eq!(differs, None, "a block of {volume} differs");
}

/// Runs commands while the volume `data` is written, which has this content. Returns its content
/// afterwards as well.
pub(crate) fn beside_a_writer<T>(
    daemon: &Daemon,
    content: &[u8],
    commands: impl FnOnce(&Daemon) -> T,
) -> (T, Vec<u8>) {
    let (stop, begun) = (AtomicBool::new(false), AtomicBool::new(false));
    let mut written = content.to_vec();
    let blocks = written.len() / BLOCK;
    let result = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = connect(daemon, "data");
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let at = round * 7919 % blocks * BLOCK;
                let data = [u8::try_from(round % 251).unwrap(); BLOCK];
                client.write(at as u64, &data, false).unwrap();
                written[at..at + BLOCK].copy_from_slice(&data);
                round += 1;
                begun.store(round > 10, Ordering::Relaxed);
            }
            client.flush().unwrap();
        });
        wait_until("the volume is written", || begun.load(Ordering::Relaxed));
        let result = commands(daemon);
        stop.store(true, Ordering::Relaxed);
        writer.join().unwrap();
        result
    });
    (result, written)
}
