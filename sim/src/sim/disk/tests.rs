use super::*;

fn write(disk: &mut Disk, token: u64, unit: u64, value: u64, fua: bool) {
    let values = vec![Value(value)];
    disk.submit(token, Action::Write { start: unit, values, fua }, true);
}

fn finish(disk: &mut Disk, token: u64, random: &mut fastrand::Rng) -> Answered {
    let at = disk.flights().iter().position(|flight| flight.token == token).unwrap();
    disk.answer(at, Fault::None, random)
}

#[test]
fn a_flush_covers_only_writes_answered_before_its_submission() {
    let random = &mut fastrand::Rng::with_seed(1);
    let mut disk = Disk::new(8);
    write(&mut disk, 1, 0, 10, false);
    finish(&mut disk, 1, random);
    write(&mut disk, 2, 1, 11, false);
    disk.submit(3, Action::Flush, false);
    finish(&mut disk, 2, random);
    finish(&mut disk, 3, random);
    disk.lose_power(&Keep::Nothing, random);
    assert_eq!((disk.peek(0), disk.peek(1)), (Value(10), Value::ZERO));
}

#[test]
fn fua_is_durable_and_an_older_write_never_comes_back_over_it() {
    let random = &mut fastrand::Rng::with_seed(1);
    let mut disk = Disk::new(8);
    write(&mut disk, 1, 0, 10, false);
    finish(&mut disk, 1, random);
    write(&mut disk, 2, 0, 11, true);
    finish(&mut disk, 2, random);
    disk.lose_power(&Keep::Everything, random);
    assert_eq!(disk.peek(0), Value(11));
}

#[test]
fn dead_writes_land_before_the_fence_is_answered() {
    let random = &mut fastrand::Rng::with_seed(3);
    let mut disk = Disk::new(8);
    write(&mut disk, 1, 0, 10, false);
    disk.lose_owner();
    disk.submit(2, Action::Fence, false);
    assert!(!disk.ready(0));
    assert!(disk.land(random));
    assert!(disk.ready(0));
    assert_eq!(disk.peek(0), Value(10));
}

#[test]
fn a_failed_flush_may_drop_answered_writes() {
    let mut dropped = 0;
    for seed in 0..32 {
        let random = &mut fastrand::Rng::with_seed(seed);
        let mut disk = Disk::new(8);
        write(&mut disk, 1, 0, 10, false);
        finish(&mut disk, 1, random);
        disk.submit(2, Action::Flush, false);
        assert_eq!(disk.answer(0, Fault::Media, random).fault, Fault::Media);
        dropped += u32::from(disk.peek(0) == Value::ZERO);
    }
    assert!((1..32).contains(&dropped), "{dropped}");
}

#[test]
fn torn_writes_keep_whole_units() {
    let random = &mut fastrand::Rng::with_seed(5);
    let mut disk = Disk::new(8);
    let values = vec![Value(1), Value(2), Value(3), Value(4)];
    disk.submit(1, Action::Write { start: 0, values, fua: false }, false);
    assert_eq!(disk.volatile(), 1);
    disk.lose_power(&Keep::MaskTorn(vec![true], 0b0101), random);
    let found: Vec<u64> = (0..4).map(|unit| disk.peek(unit).0).collect();
    assert_eq!(found, [1, 0, 3, 0]);
}
