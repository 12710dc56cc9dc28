// A few threads that wait for copies to share; made when first asked for, never destroyed.
#include "native.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#endif

namespace trinity {
namespace {

constexpr int MOST_THREADS = 16;

struct Job {
    Work work;
    void *state;
    size_t count;
    std::atomic<size_t> next{0};
    int helpers = 0; // threads that are in it; guarded by the pool's mutex

    void help() {
        for (size_t index = next++; index < count; index = next++) work(state, index);
    }
};

class Threads {
  public:
    // One job at a time: a second caller meanwhile does its own work alone, which is what a busy machine wants.
    bool run(Job &job, int helpers) {
        std::unique_lock<std::mutex> one(turn_, std::try_to_lock);
        if (!one.owns_lock()) return false;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            for (; made_ < helpers; made_++) std::thread([this] { serve(); }).detach();
            job_ = &job;
            wanted_ = helpers;
        }
        work_.notify_all();
        job.help();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr; // who comes now finds nothing; who is in it is waited for
        done_.wait(lock, [&job] { return job.helpers == 0; });
        return true;
    }

  private:
    void serve() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_.wait(lock, [this] { return job_ != nullptr && wanted_ > 0; });
            Job *job = job_;
            wanted_--;
            job->helpers++;
            lock.unlock();
            job->help();
            lock.lock();
            if (--job->helpers == 0) done_.notify_all();
        }
    }

    std::mutex turn_, mutex_;
    std::condition_variable work_, done_;
    Job *job_ = nullptr;
    int made_ = 0;
    int wanted_ = 0;
};

std::mutex making;
Threads *threads = nullptr;

// Threads do not survive a fork: the child makes its own, and leaves the parent's alone.
void forget_threads() {
    new (&making) std::mutex;
    threads = nullptr;
}

Threads &pool() {
    static const bool watching = [] {
#ifndef _WIN32
        pthread_atfork(nullptr, nullptr, forget_threads);
#endif
        return true;
    }();
    (void)watching;
    std::lock_guard<std::mutex> lock(making);
    if (threads == nullptr) threads = new Threads;
    return *threads;
}

} // namespace

void run_parallel(size_t count, int asked, Work work, void *state) {
    Job job{work, state, count};
    const auto most = static_cast<int>(std::min<size_t>(count, MOST_THREADS));
    const int helpers = std::min(asked, most) - 1;
    if (helpers < 1 || !pool().run(job, helpers)) job.help();
}

} // namespace trinity
