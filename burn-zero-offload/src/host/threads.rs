//! The thread pool of the optimizer step, and the CPUs its threads may run on.

use super::topology::Placement;

/// The threads of the step: `offload-step-0` and on, each on the CPUs of `placement`.
pub(crate) fn pool(
    placement: &Placement,
) -> Result<rayon::ThreadPool, rayon::ThreadPoolBuildError> {
    let cpus = placement.cpus.clone();
    rayon::ThreadPoolBuilder::new()
        .num_threads(placement.threads)
        .thread_name(|index| format!("offload-step-{index}"))
        .start_handler(move |_| restrict(&cpus))
        .build()
}

/// The CPUs the current thread may run on, where the system tells.
#[cfg(target_os = "linux")]
pub(super) fn affinity() -> Option<Vec<usize>> {
    use rustix::thread::{CpuSet, sched_getaffinity};
    let set = sched_getaffinity(None).ok()?;
    Some(
        (0..CpuSet::MAX_CPU)
            .filter(|&cpu| set.is_set(cpu))
            .collect(),
    )
}

#[cfg(not(target_os = "linux"))]
pub(super) fn affinity() -> Option<Vec<usize>> {
    None
}

/// Keeps the current thread on `cpus`, unless there are none or the system refuses: only speed
/// depends on it.
#[cfg(target_os = "linux")]
fn restrict(cpus: &[usize]) {
    use rustix::thread::{CpuSet, sched_setaffinity};
    if cpus.is_empty() {
        return;
    }
    let mut set = CpuSet::new();
    for &cpu in cpus.iter().filter(|&&cpu| cpu < CpuSet::MAX_CPU) {
        set.set(cpu);
    }
    let _ = sched_setaffinity(None, &set);
}

#[cfg(not(target_os = "linux"))]
fn restrict(_cpus: &[usize]) {}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use rustix::thread::{CpuSet, sched_getaffinity};

    use super::*;

    #[test]
    fn the_threads_of_the_pool_are_restricted() {
        let of_thread = || sched_getaffinity(None).unwrap();
        let here = of_thread();
        let first = (0..CpuSet::MAX_CPU).find(|&cpu| here.is_set(cpu)).unwrap();
        let mut only_first = CpuSet::new();
        only_first.set(first);

        // A CPU the set has no place for is left out.
        for (cpus, expected) in [(vec![first, 70_000], only_first), (vec![], here)] {
            let node = None;
            let threads = 3;
            let pool = pool(&Placement {
                threads,
                cpus,
                node,
            })
            .unwrap();
            let name = || std::thread::current().name().map(str::to_owned);
            let found = pool.broadcast(|_| (name().unwrap(), of_thread()));
            let names = ["offload-step-0", "offload-step-1", "offload-step-2"];
            assert_eq!(found, names.map(|name| (name.to_owned(), expected)));
        }
        assert_eq!(of_thread(), here, "the caller keeps its CPUs");
    }
}
