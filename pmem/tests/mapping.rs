//! Mappings of files in memory: bytes at every alignment, ends, bad ranges, memory that is gone.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use blockd_pmem::media::{Durability, Mapping, MappingOptions, Media, MediaError, Medium};

const LEN: u64 = 1 << 20;

fn file() -> Arc<File> {
    let flags = nix::sys::memfd::MFdFlags::MFD_CLOEXEC;
    let file = nix::sys::memfd::memfd_create(c"blockd-test", flags).expect("memory");
    let file = File::from(file);
    file.set_len(LEN).expect("a length");
    Arc::new(file)
}

fn mapping(file: &Arc<File>) -> Mapping {
    Mapping::from_file(Arc::clone(file), &MappingOptions::default()).expect("a mapping")
}

#[test]
fn every_ragged_write_is_read_as_it_was_written() {
    let file = file();
    let map = mapping(&file);
    assert_eq!((map.medium(), map.durability()), (Medium::File, Durability::Volatile));
    assert!(!map.is_write_through());
    let mut model = vec![0_u8; 4096];
    let mut rng = fastrand::Rng::with_seed(1);
    for round in 0..4000 {
        let at = rng.usize(0..model.len());
        let len = rng.usize(0..=(model.len() - at).min(300));
        if round % 5 == 0 {
            model[at..at + len].fill(0);
            map.zero(at as u64, len as u64).unwrap();
        } else {
            let bytes: Vec<u8> = (0..len).map(|_| rng.u8(..)).collect();
            model[at..at + len].copy_from_slice(&bytes);
            map.write(at as u64, &bytes).unwrap();
        }
        map.fence();
        let mut found = vec![1; model.len()];
        // Through the mapping at some alignment, and through the file.
        let from = rng.usize(0..model.len());
        map.read(from as u64, &mut found[from..]).unwrap();
        assert_eq!(found[from..], model[from..], "round {round}");
        file.read_exact_at(&mut found, 0).unwrap();
        assert_eq!(found, model, "round {round}");
    }
    map.sync().unwrap();
}

#[test]
fn nothing_beyond_the_end_is_touched() {
    let map = mapping(&file());
    for at in [LEN, LEN - 1, u64::MAX] {
        let refused = map.write(at, &[1, 2]).unwrap_err();
        assert!(matches!(refused, MediaError::Range { .. }), "{refused}");
        assert!(map.read(at, &mut [0; 2]).is_err() && map.zero(at, 2).is_err());
    }
    let mut byte = [9];
    map.read(LEN - 1, &mut byte).unwrap();
    assert_eq!(byte, [0], "a write that was refused has written");
}

#[test]
fn bad_ranges_are_not_touched_and_the_rest_is() {
    let map = mapping(&file());
    map.write(4096, &[7; 4096]).unwrap();
    map.set_bad(std::iter::once(8192..8704).collect());
    for (at, len, first) in [(8192_u64, 1_usize, 8192), (4096, 4097, 8192), (8703, 600, 8703)] {
        let refused = map.read(at, &mut vec![0; len]).unwrap_err();
        assert!(matches!(refused, MediaError::KnownBad { at } if at == first), "{refused}");
        assert!(map.write(at, &vec![1; len]).is_err() && map.zero(at, len as u64).is_err());
    }
    let mut page = [0; 4096];
    map.read(4096, &mut page).unwrap();
    assert_eq!(page, [7; 4096]);
    map.write(8704, &[1]).unwrap();
    map.set_bad(Vec::new());
    map.read(8192, &mut page).unwrap();
}

#[test]
fn memory_that_is_gone_is_an_error_and_the_rest_goes_on() {
    let file = file();
    let map = mapping(&file);
    map.write(0, &[5; 8192]).unwrap();
    file.set_len(8192).unwrap();
    let mut bytes = vec![0; 8192];
    // From the middle of a page across the end of the remaining memory, at each kind of access.
    for at in [6000_u64, 8191, 4096 + 64] {
        let failed = map.read(at, &mut bytes).unwrap_err();
        let MediaError::Failed { at: found } = failed else { panic!("{failed}") };
        assert!((8192 - 64..=8192).contains(&found), "read at {at}: {found}");
        let whole = usize::try_from(found - at).expect("bytes in front of the end");
        let mut there = vec![0; whole];
        file.read_exact_at(&mut there, at).unwrap();
        assert_eq!(bytes[..whole], there, "read at {at}");
        let failed = map.write(at, &[6; 8192]).unwrap_err();
        let MediaError::Failed { at: found } = failed else { panic!("{failed}") };
        assert!((8192 - 64..=8192).contains(&found), "write at {at}: {found}");
        let failed = map.zero(at, 8192).unwrap_err();
        assert!(matches!(failed, MediaError::Failed { .. }), "{failed}");
    }
    // Where memory remains, the bytes written before the end are there.
    let mut front = [0; 6000];
    map.read(0, &mut front).unwrap();
    assert_eq!(front[..4160], [5; 4160]);
    // Other threads have the same luck, many times over.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200 {
                    assert!(map.read(8192, &mut [0; 64]).is_err());
                    assert!(map.read(5000, &mut [0; 4096]).is_err());
                    map.read(0, &mut [0; 64]).unwrap();
                }
            });
        }
    });
    file.set_len(LEN).unwrap();
    map.read(8192, &mut bytes).unwrap();
    assert_eq!(bytes, vec![0; 8192]);
}

/// Set in the process that is to die.
const DIES: &str = "BLOCKD_TEST_DIES";

#[test]
fn a_signal_from_another_process_still_kills() {
    if std::env::var_os(DIES).is_some() {
        let _map = mapping(&file());
        nix::sys::signal::raise(nix::sys::signal::Signal::SIGBUS).unwrap();
        return;
    }
    let program: PathBuf = std::env::current_exe().unwrap();
    let mut command = Command::new(program);
    command.env(DIES, "1").args(["--exact", "a_signal_from_another_process_still_kills"]);
    let output = command.output().unwrap();
    assert_eq!(output.status.signal(), Some(libc::SIGBUS), "{:?}", output.status);
}
