//! The mapper's short operations, measured by criterion: `cargo bench --package blockd-bench`. It
//! says how two builds differ; `cargo ci bench mapper` says whether budgets are kept.

use std::hint::black_box;

use blockd_bench::budgets::lookup::Map;
use blockd_bench::budgets::rig::{BLOCK, EXTENT, Media, Rig, TIB, mix};
use blockd_mapper::plan::Plan;
use blockd_testkit::folder::Folder;
use criterion::{Criterion, criterion_group, criterion_main};

/// Extents of 1 TiB, which no cache holds, and of 1 GiB, which one does.
const MANY: u64 = TIB / EXTENT;
const FEW: u64 = (1 << 30) / EXTENT;

fn lookups(criterion: &mut Criterion) {
    let map = Map::fragmented(MANY).expect("memory for a map of 1 TiB");
    let mut group = criterion.benchmark_group("lookup in 1 TiB");
    let (mut extent, mut number) = (0, 0);
    group.bench_function("each after the other", |bencher| {
        bencher.iter(|| {
            number += 1;
            extent = mix(map.lookup(extent) ^ number) % MANY;
            black_box(extent)
        });
    });
    group.bench_function("32 known ahead", |bencher| {
        bencher.iter(|| {
            let mut sum = 0;
            for _ in 0..32 {
                number += 1;
                sum ^= map.lookup(mix(number) % MANY);
            }
            black_box(sum)
        });
    });
}

fn plans(criterion: &mut Criterion) {
    let scratch = Folder::new("criterion").expect("a folder");
    let size = FEW * EXTENT;
    let media = Media::create(&scratch.path().join("pool"), 2 * size).expect("a pool's file");
    let mut rig = Rig::create(media, None).expect("a pool");
    let volume = rig.volume("a", size).expect("a volume");
    let mut number = 0;
    let mut group = criterion.benchmark_group("plan and complete 4 KiB in 1 GiB");
    for extent in 0..FEW {
        rig.write(&volume, extent * EXTENT).expect("a first write");
    }
    group.bench_function("read", |bencher| {
        bencher.iter(|| {
            number += 1;
            black_box(rig.read(&volume, mix(number) % FEW * EXTENT).expect("a read"))
        });
    });
    let mut plan = Plan::with_capacity(0);
    group.bench_function("overwrite", |bencher| {
        bencher.iter(|| {
            number += 1;
            let offset = mix(number) % FEW * EXTENT;
            rig.worker.write(&volume, offset, BLOCK, false, &mut plan).expect("a plan");
            rig.worker.complete(&volume, &mut plan, Ok(())).expect("completed")
        });
    });
    group.finish();
    rig.close(volume).expect("closed");
}

criterion_group!(all, lookups, plans);
criterion_main!(all);
